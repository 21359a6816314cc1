"""Every regularizer against finite differences in float64, and its formula against numbers worked out elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tinkex import types
from tinkex.losses import regularizers
from tinkex.losses.regularizers import (
    L1,
    L2,
    Consistency,
    ElasticNet,
    Entropy,
    GradientPenalty,
    KLDivergence,
    Orthogonality,
    Pipeline,
)

LOGPROBS = [-0.5, -1.2, -0.8, -2.1, -0.3, -1.5, -0.9, -1.8, -0.6, -1.1]
REFERENCE = np.log([0.22, 0.18, 0.12, 0.1, 0.08, 0.07, 0.06, 0.06, 0.06, 0.05])
PAIR = [-0.45, -1.05, -0.75, -2.05, -0.25, -1.35, -0.85, -1.65, -0.55, -1.05]


def datum(length: int, **inputs: Any) -> types.Datum:
    arrays = {name: np.asarray(value, np.float32) for name, value in inputs.items()}
    return types.Datum(
        types.ModelInput.from_ints(list(range(1, length + 1))), {"target_tokens": [1] * length, **arrays}
    )


def leaves(*values: Any) -> list[torch.Tensor]:
    return [torch.tensor(np.asarray(v), dtype=torch.float64, requires_grad=True) for v in values]


def value_of(regularizer: Any, data: Sequence[types.Datum], logprobs: Sequence[torch.Tensor]) -> float:
    return float(regularizer(data, logprobs)[0].detach())


def finite_differences(
    regularizer: Any, data: Sequence[types.Datum], logprobs: Sequence[torch.Tensor], h: float = 1e-5
) -> list[torch.Tensor]:
    slopes = []
    for index, lp in enumerate(logprobs):
        slope = torch.zeros_like(lp)
        for at in np.ndindex(*lp.shape):
            sides = []
            for sign in (1, -1):
                moved = [one.detach().clone().requires_grad_() for one in logprobs]
                with torch.no_grad():
                    moved[index][at] += sign * h
                sides.append(value_of(regularizer, data, moved))
            slope[at] = (sides[0] - sides[1]) / (2 * h)
        slopes.append(slope)
    return slopes


def cubes(data: Any, logprobs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    return torch.stack([(lp**3).sum() for lp in logprobs]).sum(), {}


RNG = np.random.default_rng(5)
FLAT = [-RNG.uniform(0.2, 3.0, n) for n in (5, 3)]
WIDE = [np.log(RNG.dirichlet(np.ones(4), n) * 0.9) for n in (3, 2)]
EXTRA = {
    "reference": [-RNG.uniform(0.2, 3.0, n) for n in (5, 3)],
    "weights": [np.array([0, 1, 1, 0, 1.0]), np.array([1, 1, 0.0])],
    "drawn": [-RNG.uniform(0.2, 3.0, n) for n in (5, 3)],
}
WIDE_REFERENCE = [np.log(RNG.dirichlet(np.ones(4), n) * 0.8) for n in (3, 2)]

ON_TOKENS = {
    "l1": L1(),
    "l1 of probabilities": L1(of="probs", reduction="mean"),
    "l1 of some positions": L1(where="weights"),
    "l2": L2(),
    "l2 around the mean": L2(center="mean", reduction="mean"),
    "l2 around a number, clipped": L2(center=-1.0, clip=0.7),
    "elastic net": ElasticNet(l1_ratio=0.3),
    "elastic net of probabilities": ElasticNet(of="probs", where="weights"),
    "entropy share": Entropy(),
    "entropy share, rewarded": Entropy(mode="maximize", reduction="sum", where="weights"),
    "entropy of drawn targets": Entropy(sampled_by="drawn"),
    "forward KL": KLDivergence("reference"),
    "reverse KL": KLDivergence("reference", direction="reverse", reduction="sum"),
    "symmetric KL": KLDivergence("reference", direction="symmetric", where="weights"),
    "forward KL of drawn targets": KLDivergence("reference", sampled_by="drawn"),
    "reverse KL of drawn targets": KLDivergence("reference", direction="reverse", sampled_by="reference"),
    "KL to arrays": KLDivergence(EXTRA["reference"]),
    "KL to a function": KLDivergence(lambda data: EXTRA["reference"]),
    "consistency": Consistency("reference"),
    "consistency l1": Consistency("reference", metric="l1", reduction="sum"),
    "consistency cosine": Consistency("reference", metric="cosine", where="weights"),
    "consistency kl": Consistency("reference", metric="kl"),
    "orthogonality": Orthogonality(),
    "orthogonality of centred rows": Orthogonality(center=True),
    "orthogonality, hard": Orthogonality(mode="hard", normalize=False),
    "orthogonality, spectral": Orthogonality(mode="spectral", normalize=False),
    "gradient penalty": GradientPenalty(cubes),
    "gradient penalty between": GradientPenalty(cubes, mode="interpolated", reference="reference", seed=3),
}
ON_CANDIDATES = {
    "l2": L2(center="mean"),
    "entropy": Entropy(),
    "entropy, sharper": Entropy(temperature=0.5),
    "entropy, of its largest": Entropy(normalize=True, temperature=2.0),
    "forward KL": KLDivergence(WIDE_REFERENCE),
    "symmetric KL": KLDivergence(WIDE_REFERENCE, direction="symmetric"),
    "consistency kl": Consistency(WIDE_REFERENCE, metric="kl"),
    "orthogonality of positions": Orthogonality(rows="positions"),
    "orthogonality of candidates": Orthogonality(rows="candidates", center=True),
    "gradient penalty": GradientPenalty(cubes, target_norm=0.0),
}


def check_slopes(regularizer: Any, data: Sequence[types.Datum], logprobs: list[torch.Tensor]) -> None:
    value, metrics = regularizer(data, logprobs)
    assert all(math.isfinite(number) for number in metrics.values())
    slopes = torch.autograd.grad(value, logprobs, allow_unused=True)
    expected = finite_differences(regularizer, data, logprobs)
    assert any(slope.abs().max() > 1e-3 for slope in expected), "this point shows nothing"
    for slope, want in zip(slopes, expected, strict=True):
        torch.testing.assert_close(slope, want, rtol=1e-6, atol=1e-8)


def test_every_regularizer_is_held_against_finite_differences() -> None:
    offered = [getattr(regularizers, name) for name in regularizers.__all__]
    penalties = {kind for kind in offered if isinstance(kind, type) and "__call__" in vars(kind)}
    assert penalties == {type(each) for each in ON_TOKENS.values()}


# float32 is what travels in loss_fn_inputs: fixed values lose digits there, and the same ones both times.
@pytest.mark.parametrize("regularizer", ON_TOKENS.values(), ids=ON_TOKENS.keys())
def test_the_gradient_is_the_slope_of_the_value_on_tokens(regularizer: Any) -> None:
    data = [datum(n, **{k: v[i] for k, v in EXTRA.items()}) for i, n in enumerate((5, 3))]
    check_slopes(regularizer, data, leaves(*FLAT))


@pytest.mark.parametrize("regularizer", ON_CANDIDATES.values(), ids=ON_CANDIDATES.keys())
def test_the_gradient_is_the_slope_of_the_value_on_candidates(regularizer: Any) -> None:
    check_slopes(regularizer, [datum(3), datum(2)], leaves(*WIDE))


@pytest.mark.parametrize("regularizer", [L2(), Entropy(), Entropy(normalize=True)], ids=lambda r: r.name)
def test_datums_may_have_different_numbers_of_candidates(regularizer: Any) -> None:
    ragged = [np.log(RNG.dirichlet(np.ones(k), 2)) for k in (4, 3)]
    check_slopes(regularizer, [datum(2), datum(2)], leaves(*ragged))


@pytest.mark.parametrize(
    "regularizer",
    [
        L1(),
        L2(),
        ElasticNet(),
        Entropy(),
        KLDivergence("reference"),
        Consistency("reference"),
        Orthogonality(),
        GradientPenalty(cubes),
    ],
    ids=lambda regularizer: regularizer.name,
)
def test_empty_data_is_an_error_that_says_so(regularizer: Any) -> None:
    with pytest.raises(ValueError, match="the data is empty"):
        regularizer([], [])
    with pytest.raises(ValueError, match="the data is empty"):
        Pipeline([types.RegularizerSpec(regularizer, weight=1.0)]).evaluate([], [], cubes)


def test_live_pairs_pull_both_sides_together() -> None:
    together = Consistency(pairs=lambda data: [(0, 1)])
    data, logprobs = [datum(3), datum(3)], leaves([-1.0, -2.0, -0.5], [-1.5, -1.0, -0.7])
    check_slopes(together, data, logprobs)
    (first, second) = torch.autograd.grad(together(data, logprobs)[0], logprobs)
    torch.testing.assert_close(first, -second)
    with pytest.raises(ValueError, match="same targets"):
        together([datum(3), datum(2)], leaves([-1.0, -2.0, -0.5], [-1.5, -1.0]))


@pytest.mark.parametrize(
    ("regularizer", "expected"),
    [
        (L1(), 10.8),
        (L2(center="mean"), 3.036),
        (ElasticNet(l1_ratio=0.6), 12.36),
        (Entropy(mode="maximize", reduction="sum"), -3.197157),
        (Consistency([PAIR]), 0.0085),
        (Orthogonality(), 0.0),
        (GradientPenalty(lambda data, lps: (lps[0].sum(), {})), 4.675445),
    ],
    ids=lambda one: getattr(one, "name", str(one)),
)
def test_values_worked_out_elsewhere(regularizer: Any, expected: float) -> None:
    assert value_of(regularizer, [datum(10)], leaves(LOGPROBS)) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("regularizer", "expected"),
    [
        (L1(reduction="mean"), {"l1_raw": 10.8, "l1_mean": 1.08}),
        (L2(center="mean"), {"l2_raw": 14.7, "l2_mean": 1.47, "center": -1.08}),
        (ElasticNet(l1_ratio=0.6), {"l1_ratio": 0.6}),
    ],
)
def test_norms_report_their_sum_and_mean_before_centering(
    regularizer: Any, expected: dict[str, float]
) -> None:
    assert regularizer([datum(10)], leaves(LOGPROBS))[1] == pytest.approx(expected, abs=1e-6)


def test_temperature_is_over_the_candidates_of_a_position() -> None:
    sharp = Entropy(mode="maximize", temperature=0.5)
    assert value_of(sharp, [datum(1)], leaves([LOGPROBS])) == pytest.approx(-1.935401, abs=1e-6)


@pytest.mark.parametrize(
    ("direction", "plain"), [("forward", 6.086951), ("reverse", -1.156869), ("symmetric", 2.465041)]
)
def test_a_divergence_of_part_of_a_distribution_is_never_negative(direction: Any, plain: float) -> None:
    """The sum of P·ln(P/Q) alone may be; the terms −P + Q make it a share of the whole divergence."""
    ours = value_of(
        KLDivergence([REFERENCE], direction=direction, reduction="sum"), [datum(10)], leaves(LOGPROBS)
    )
    mass = np.exp(LOGPROBS).sum() - np.exp(REFERENCE).sum()
    correction = {"forward": -mass, "reverse": mass, "symmetric": 0.0}[direction]
    assert ours == pytest.approx(plain + correction, abs=1e-6)
    assert ours > 0


# ---- against whole distributions ----

VOCABULARY = 7


def whole(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(VOCABULARY, generator=generator, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(VOCABULARY, generator=generator, dtype=torch.float64).log_softmax(-1)
    return logits, reference


def truth(what: str, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return {
        "entropy": -(p.exp() * p).sum(),
        "forward": (p.exp() * (p - q)).sum(),
        "reverse": (q.exp() * (q - p)).sum(),
        "symmetric": ((p.exp() - q.exp()) * (p - q)).sum() / 2,
    }[what]


def regularizer_for(what: str, **options: Any) -> Any:
    return Entropy(**options) if what == "entropy" else KLDivergence("ref", direction=what, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("what", ["entropy", "forward", "reverse", "symmetric"])
def test_over_a_whole_vocabulary_the_share_is_the_whole(what: str) -> None:
    logits, reference = whole(1)
    p = logits.log_softmax(-1)
    regularizer = Entropy() if what == "entropy" else KLDivergence([reference[None]], direction=what)  # type: ignore[arg-type]
    value, _ = regularizer([datum(1)], [p[None]])
    expected = truth(what, p, reference)
    torch.testing.assert_close(value, expected)
    (slope,) = torch.autograd.grad(value, logits, retain_graph=True)
    torch.testing.assert_close(slope, torch.autograd.grad(expected, logits)[0])


@pytest.mark.parametrize("what", ["entropy", "forward", "reverse", "symmetric"])
@pytest.mark.parametrize("drawn_by", ["model", "another"])
def test_drawn_targets_estimate_the_whole_without_bias(what: str, drawn_by: str) -> None:
    """Every token once, weighted by how often it is drawn: the mean of the estimates, value and gradient."""
    logits, reference = whole(2)
    p = logits.log_softmax(-1)
    drawn = (
        p.detach()
        if drawn_by == "model"
        else torch.linspace(-1, 1, VOCABULARY, dtype=torch.float64).log_softmax(-1)
    )
    mean = torch.zeros((), dtype=torch.float64)
    for token in range(VOCABULARY):
        data = [datum(1)]
        sampled_by = "model" if drawn_by == "model" else "drawn"
        if what == "entropy":
            regularizer: Any = Entropy(sampled_by=sampled_by)
        else:
            regularizer = KLDivergence([reference[token : token + 1]], direction=what, sampled_by=sampled_by)  # type: ignore[arg-type]
        if sampled_by == "drawn":
            data = [datum(1, drawn=[float(drawn[token])])]
        value, _ = regularizer(data, [p[token : token + 1]])
        mean = mean + drawn[token].exp() * value
    expected = truth(what, p, reference)
    torch.testing.assert_close(mean, expected, rtol=1e-5, atol=1e-7)
    (slope,) = torch.autograd.grad(mean, logits, retain_graph=True)
    torch.testing.assert_close(slope, torch.autograd.grad(expected, logits)[0], rtol=1e-5, atol=1e-6)


# ---- edges and rejections ----


def test_positions_may_all_be_left_out() -> None:
    data = [datum(2, weights=[0, 0])]
    for regularizer in (L1(where="weights"), L2(center="mean", where="weights"), Entropy(where="weights")):
        logprobs = leaves([-1.0, -2.0])
        value, _ = regularizer(data, logprobs)
        assert float(value.detach()) == 0
        assert torch.autograd.grad(value, logprobs)[0].tolist() == [0, 0]


def test_a_token_that_is_ruled_out_stays_finite() -> None:
    data, ruled_out = [datum(2)], [np.array([-math.inf, -1.0])]
    for direction in ("forward", "reverse", "symmetric"):
        logprobs = leaves([-1.0, -1.0])
        value, _ = KLDivergence(ruled_out, direction=direction)(data, logprobs)
        assert math.isfinite(float(value.detach()))
        assert torch.autograd.grad(value, logprobs)[0].isfinite().all()
    assert value_of(KLDivergence(ruled_out), data, leaves(ruled_out[0])) == 0


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: L1(of="weights"), "'logprobs' or 'probs'"),
        (lambda: L2(center="median"), "center must be 'mean'"),
        (lambda: L2(clip=0.0), "clip must be above 0"),
        (lambda: ElasticNet(l1_ratio=1.5), "between 0"),
        (lambda: Entropy(mode="more"), "'minimize' or 'maximize'"),
        (lambda: Entropy(reduction="none"), "reduction must be 'mean' or 'sum'"),
        (lambda: Entropy(temperature=0.0), "temperature must be above 0"),
        (lambda: Entropy(temperature=0.5, sampled_by="model"), "Choose one"),
        (lambda: KLDivergence("r", direction="sideways"), "direction must be"),
        (Consistency, "takes either pair or pairs"),
        (lambda: Consistency("a", pairs=lambda data: []), "takes either pair or pairs"),
        (lambda: Orthogonality(rows="vocabulary"), "rows must be"),
        (lambda: GradientPenalty(None), "needs a loss"),
        (lambda: GradientPenalty(cubes, mode="interpolated"), "reference"),
        (lambda: GradientPenalty(cubes, target_norm=-1.0), "target_norm"),
    ],
)
def test_options_that_cannot_be_honoured_are_rejected(build: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        build()


@pytest.mark.parametrize(
    ("regularizer", "message"),
    [
        (KLDivergence("nothing"), "no 'nothing' in its loss_fn_inputs"),
        (KLDivergence([np.zeros(3)]), r"shape \(3,\)"),
        (KLDivergence([np.zeros(2)] * 2), "2 datums; there are 1"),
        (Entropy(temperature=0.5), "several candidates"),
        (Entropy(normalize=True), "several candidates"),
        (Orthogonality(rows="positions"), "several candidates"),
        (L1(where="short"), "one number for each of the 2"),
        (GradientPenalty(lambda d, l: (torch.tensor(1.0), {})), "does not depend"),
    ],
)
def test_data_that_a_regularizer_cannot_use_is_rejected(regularizer: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        regularizer([datum(2, short=[1.0])], leaves([-1.0, -2.0]))


@pytest.mark.parametrize("returned", [torch.tensor(1.0), 1.0, (torch.ones(2), {}), None])
def test_a_penalized_loss_that_returns_something_else_is_rejected_with_its_name(returned: Any) -> None:
    penalty = GradientPenalty(lambda data, logprobs: returned)
    with pytest.raises(TypeError, match="the loss of GradientPenalty must return"):
        penalty([datum(2)], leaves([-1.0, -2.0]))


def test_drawn_targets_come_one_per_position() -> None:
    with pytest.raises(ValueError, match="one sampled target"):
        Entropy(sampled_by="model")([datum(3), datum(2)], leaves(*WIDE))


@pytest.mark.parametrize(
    ("term", "expected"),
    [
        (L1(field="advantages"), 6.0),
        (L1(field="advantages", reduction="mean"), 2.0),
        (L1(field="advantages", where="weights"), 3.0),
        (L2(field="advantages"), 14.0),
        (L2(field="advantages", center="mean"), 14.0 - 4.0 / 3.0),
        (L2(field="advantages", clip=1.5), 1.0 + 2.25 + 2.25),
        (ElasticNet(field="advantages", l1_ratio=0.5), 10.0),
    ],
)
def test_a_norm_of_an_input_covers_all_datums_and_has_no_gradient(term: Any, expected: float) -> None:
    data = [
        datum(2, advantages=[1.0, -2.0], weights=[0.0, 0.0]),
        datum(1, advantages=[3.0], weights=[1.0]),
    ]
    points = leaves([-0.5, -1.0], [-2.0])
    value, _ = term(data, points)
    value.backward()
    assert float(value.detach()) == pytest.approx(expected, rel=1e-5)
    assert all(point.grad is None or not point.grad.any() for point in points)


@pytest.mark.parametrize("kind", [L1, L2, ElasticNet])
def test_a_norm_of_an_input_needs_the_input(kind: Any) -> None:
    with pytest.raises(ValueError, match="'field' or of='probs'"):
        kind(of="probs", field="advantages")
    with pytest.raises(ValueError, match="has no 'advantages'"):
        kind(field="advantages")([datum(1)], leaves([-0.5]))
    with pytest.raises(ValueError, match="shape"):
        kind(field="advantages")([datum(1, advantages=[1.0, 2.0])], leaves([-0.5]))
