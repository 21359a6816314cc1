"""Regularizers in a real pass: the server applies exactly what they report."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import tinkex
from tests.contract.backends import BASE_MODEL, WITH_A_MODEL
from tinkex import types
from tinkex.losses.regularizers import (
    L1,
    L2,
    Consistency,
    ElasticNet,
    Entropy,
    GradientPenalty,
    KLDivergence,
    Orthogonality,
)

pytestmark = pytest.mark.slow

SPEC = types.RegularizerSpec


@pytest.fixture
def training(service: tinkex.ServiceClient) -> tinkex.TrainingClient:
    return service.create_lora_training_client(BASE_MODEL, rank=4, seed=1)


def datum(shift: int = 0, **inputs: Any) -> types.Datum:
    tokens = [5 + shift, 9, 12, 7]
    arrays = {name: np.asarray(value, np.float32) for name, value in inputs.items()}
    return types.Datum(
        types.ModelInput.from_ints(tokens[:-1]),
        {"target_tokens": tokens[1:], "reference": np.float32([-2.0, -3.0, -1.5]), **arrays},
    )


def plain(one: types.Datum) -> types.Datum:
    """Without the inputs that only a regularizer reads."""
    return types.Datum(one.model_input, {"target_tokens": one.loss_fn_inputs["target_tokens"]})


DATA = [datum(), datum(3)]


def nll(data: Any, logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    return -torch.cat(logprobs).sum(), {}


def squares(data: Any, logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    return torch.cat(logprobs).square().sum(), {}


ALL = [
    SPEC(L1(of="probs"), 0.3),
    SPEC(L2(center="mean"), 0.01),
    SPEC(ElasticNet(), 0.01),
    SPEC(Entropy(mode="maximize", sampled_by="model"), 0.1),
    SPEC(KLDivergence("reference"), 0.2, name="kl"),
    SPEC(KLDivergence("reference", direction="symmetric", sampled_by="model"), 0.1, name="kl_drawn"),
    SPEC(Consistency("reference"), 0.05),
    SPEC(Orthogonality(center=True), 0.05),
    SPEC(GradientPenalty(squares, target_norm=10.0), 0.001),
]


def test_every_regularizer_is_part_of_the_pass_and_reported(training: tinkex.TrainingClient) -> None:
    seen = training.forward([plain(one) for one in DATA], "cross_entropy").result()
    output = training.forward_backward_custom(DATA, nll, regularizers=ALL).result(timeout=60)
    logprobs = [one["logprobs"].to_numpy() for one in seen.loss_fn_outputs]
    expected = tinkex.losses.regularizers.Pipeline(ALL).evaluate(DATA, logprobs, nll)
    assert output.metrics["loss:sum"] == pytest.approx(expected.loss_total, rel=1e-5)
    for name, term in expected.regularizers.items():
        assert output.metrics[f"regularizer/{name}/value:sum"] == pytest.approx(
            term.value, rel=1e-5, abs=1e-7
        )
        assert output.metrics[f"regularizer/{name}/grad_norm:mean"] == pytest.approx(term.grad_norm, rel=1e-4)


async def test_the_async_form_takes_them_too(training: tinkex.TrainingClient) -> None:
    output = await (await training.forward_backward_custom_async(DATA, nll, regularizers=[SPEC(L2(), 0.5)]))
    values = output.metrics
    total = values["base_loss:sum"] + values["regularizer/l2/contribution:sum"]
    assert values["loss:sum"] == pytest.approx(total, rel=1e-5)


def probabilities(training: tinkex.TrainingClient, data: list[types.Datum]) -> np.ndarray:
    output = training.forward([plain(one) for one in data], "cross_entropy").result(timeout=60)
    return np.exp(np.concatenate([one["logprobs"].to_numpy() for one in output.loss_fn_outputs]))


def is_nan(data: Any, logprobs: list[torch.Tensor]) -> Any:
    return logprobs[0].sum() * float("nan"), {}


def is_a_vector(data: Any, logprobs: list[torch.Tensor]) -> Any:
    return logprobs[0] * 2, {}


def raises(data: Any, logprobs: list[torch.Tensor]) -> Any:
    raise LookupError("no reference today")


def says_words(data: Any, logprobs: list[torch.Tensor]) -> Any:
    return logprobs[0].sum(), {"direction": "forward"}


@pytest.mark.backends(*WITH_A_MODEL)
@pytest.mark.parametrize("waits", [False, True], ids=["in turn", "beside the others"])
@pytest.mark.parametrize(
    ("broken", "kind"),
    [
        (is_nan, ValueError),
        (is_a_vector, TypeError),
        (raises, LookupError),
        (says_words, ValueError),
    ],
)
def test_a_term_that_fails_fails_the_pass_alone_and_adds_nothing(
    training: tinkex.TrainingClient, broken: Any, kind: type[Exception], waits: bool
) -> None:
    before = probabilities(training, DATA)
    terms = [SPEC(L2(), 0.5), SPEC(broken, 1.0, waits=waits), SPEC(L1(), 0.1, waits=True)]
    with pytest.raises(kind) as caught:
        training.forward_backward_custom(DATA, nll, regularizers=terms).result(timeout=60)
    assert broken.__name__ in str(caught.value) or broken.__name__ in "".join(caught.value.__notes__)
    training.optim_step(types.AdamParams(learning_rate=0.5)).result(timeout=60)
    np.testing.assert_array_equal(probabilities(training, DATA), before)
    passed = training.forward_backward_custom(DATA, nll, regularizers=[SPEC(L2(), 0.5)])
    assert passed.result(timeout=60).metrics["loss:sum"] > 0, "the run continues"


@pytest.mark.slow
@pytest.mark.backends(*WITH_A_MODEL)
@pytest.mark.parametrize(
    ("regularizer", "grows"),
    [(L1(), True), (L1(of="probs"), False), (KLDivergence("sure", direction="reverse"), True)],
    ids=["likelier", "less likely", "to the reference"],
)
def test_training_on_a_penalty_alone_moves_the_model_as_it_says(
    training: tinkex.TrainingClient, regularizer: Any, grows: bool
) -> None:
    def nothing(data: Any, logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return 0.0 * logprobs[0].sum(), {}

    data = [datum(sure=[-0.1, -0.1, -0.1])]
    before = probabilities(training, data)
    losses = []
    for _ in range(6):
        passed = training.forward_backward_custom(data, nothing, regularizers=[SPEC(regularizer, 1.0)])
        training.optim_step(types.AdamParams(learning_rate=3e-2)).result(timeout=60)
        losses.append(passed.result(timeout=60).metrics["loss:sum"])
    assert losses[-1] < losses[0]
    after = probabilities(training, data)
    assert (after.sum() > before.sum()) is np.bool_(grows)
