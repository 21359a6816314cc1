"""Tokens drawn by the core against those drawn by torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.unit.engine.kernels.cores import CORES
from tinkex.engine.model.loader import load_transformer
from tinkex.engine.sampler.compiled import CompiledCompute
from tinkex.engine.sampler.logits import RowSettings, draw

pytestmark = pytest.mark.skipif(not CORES, reason="the package was installed without its compiled core")

SETTINGS = [
    RowSettings(),
    RowSettings(temperature=0),
    RowSettings(temperature=0.3),
    RowSettings(temperature=2.5),
    RowSettings(top_k=5),
    RowSettings(top_p=0.8),
    RowSettings(temperature=0.7, top_k=50, top_p=0.5),
]


@pytest.fixture(params=CORES)
def compiled(request: pytest.FixtureRequest, tiny_model: Path) -> CompiledCompute:
    return CompiledCompute(load_transformer(tiny_model), CORES[request.param])


def logits_of(rows: int, seed: int) -> torch.Tensor:
    return 4 * torch.randn(rows, 512, generator=torch.Generator().manual_seed(seed))


def test_the_same_uniforms_draw_the_same_tokens(compiled: CompiledCompute) -> None:
    rows = 40 * len(SETTINGS)
    logits = logits_of(rows, 1)
    settings = SETTINGS * 40
    uniforms = np.random.default_rng(2).random(rows).tolist()
    ours, theirs = compiled.draw(logits, settings, uniforms), draw(logits, settings, uniforms)
    assert ours.tokens_B.tolist() == theirs.tokens_B.tolist()
    torch.testing.assert_close(ours.logprobs_B, theirs.logprobs_B, atol=1e-5, rtol=0)
    torch.testing.assert_close(
        ours.distribution(range(rows)), theirs.distribution(range(rows)), atol=1e-5, rtol=0
    )
    assert ours.finite_B.all()


@pytest.mark.parametrize("uniform", [0.0, 1e-12, 0.5, 1 - 2**-53])
def test_a_token_without_mass_is_never_drawn(compiled: CompiledCompute, uniform: float) -> None:
    logits = torch.full((2, 512), -torch.inf)
    logits[0, 3] = logits[1, 509] = 0.0
    drawn = compiled.draw(logits, [RowSettings()] * 2, [uniform] * 2)
    assert drawn.tokens_B.tolist() == [3, 509]
    assert drawn.logprobs_B.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("setting", [RowSettings(), RowSettings(temperature=0), RowSettings(top_k=3)])
def test_logits_that_are_not_finite_are_reported(
    compiled: CompiledCompute, poison: float, setting: RowSettings
) -> None:
    logits = logits_of(3, 1)
    logits[1, 200] = poison
    drawn = compiled.draw(logits, [setting] * 3, [0.5] * 3)
    assert drawn.finite_B.tolist() == [True, False, True]
    assert 0 <= int(drawn.tokens_B[1]) < 512


def test_the_argmax_is_the_first_of_equals(compiled: CompiledCompute) -> None:
    logits = torch.zeros(1, 512)
    logits[0, [40, 41, 300]] = 2.0
    assert compiled.draw(logits, [RowSettings(temperature=0)], [0.9]).tokens_B.tolist() == [40]


def test_drawn_tokens_follow_the_distribution(compiled: CompiledCompute) -> None:
    row = torch.full((512,), -torch.inf)
    row[[1, 100, 300, 511]] = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    uniforms = ((np.arange(1000) + 0.5) / 1000).tolist()
    drawn = compiled.draw(row.repeat(1000, 1), [RowSettings()] * 1000, uniforms)
    tokens, counts = np.unique(drawn.tokens_B.numpy(), return_counts=True)
    assert tokens.tolist() == [1, 100, 300, 511]
    np.testing.assert_allclose(counts, [100, 200, 300, 400], atol=1)


@pytest.mark.parametrize("temperature", [1e-6, 1e-3, 0.1, 1.0, 1e3])
@pytest.mark.parametrize("level", [0.0, 1000.0])
def test_logprobs_keep_their_bits_at_any_temperature(
    compiled: CompiledCompute, temperature: float, level: float
) -> None:
    """Logits that lie close together, a few of them equal: what counts is how far apart they are, not how high."""
    paged = torch.randint(0, 9, (8, 512), generator=torch.Generator().manual_seed(1))
    logits = level + paged * max(temperature, 2.0**-10)
    scale = torch.tensor(temperature).double()  # as fp32 has it
    expected = ((logits.double() - logits.double().amax(-1, keepdim=True)) / scale).log_softmax(-1)
    settings, uniforms = [RowSettings(temperature=temperature)] * 8, np.linspace(0.01, 0.99, 8).tolist()
    for drawn in (compiled.draw(logits, settings, uniforms), draw(logits, settings, uniforms)):
        of_tokens = expected.gather(1, drawn.tokens_B[:, None])[:, 0]
        torch.testing.assert_close(drawn.logprobs_B.double(), of_tokens, atol=2e-6, rtol=0)
        torch.testing.assert_close(drawn.distribution(range(8)).double(), expected, atol=2e-6, rtol=1e-6)
