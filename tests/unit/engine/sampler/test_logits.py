from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tinkex.engine.sampler.logits import RowSettings, draw, sample_rng, scaled_logprobs

pytestmark = pytest.mark.slow


def random_logits(rows: int, vocab: int = 700, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def test_temperature_zero_takes_the_argmax_and_reports_its_logprob_at_temperature_one() -> None:
    logits = random_logits(4)
    drawn = draw(logits, [RowSettings(temperature=0)] * 4, [0.9] * 4)
    assert torch.equal(drawn.tokens_B, logits.argmax(-1))
    expected = torch.log_softmax(logits, -1).max(-1).values
    torch.testing.assert_close(drawn.logprobs_B, expected)


def test_logprobs_are_those_of_the_temperature_scaled_distribution_before_truncation() -> None:
    logits = random_logits(3)
    settings = [RowSettings(0.5), RowSettings(2.0, top_k=3), RowSettings(0.7, top_p=0.4)]
    drawn = draw(logits, settings, [0.3, 0.6, 0.9])
    for row, setting in enumerate(settings):
        expected = torch.log_softmax(logits[row] / setting.temperature, -1)[drawn.tokens_B[row]]
        assert drawn.logprobs_B[row].item() == pytest.approx(expected.item(), abs=1e-5)


@pytest.mark.parametrize(
    "settings", [RowSettings(top_k=1), RowSettings(top_p=1e-9), RowSettings(top_k=5, top_p=1e-9)]
)
@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
def test_a_truncation_to_one_token_is_greedy(settings: RowSettings, uniform: float) -> None:
    logits = random_logits(2)
    assert torch.equal(draw(logits, [settings] * 2, [uniform] * 2).tokens_B, logits.argmax(-1))


def test_a_row_is_drawn_the_same_alone_and_among_rows_with_other_settings() -> None:
    settings = [
        RowSettings(),
        RowSettings(temperature=0),
        RowSettings(top_k=7),
        RowSettings(top_p=0.9),
        RowSettings(0.8, top_k=40, top_p=0.5),
        RowSettings(1.5, top_p=0.999),
    ]
    logits = random_logits(len(settings))
    uniforms = [0.11, 0.22, 0.33, 0.44, 0.77, 0.999]
    together = draw(logits, settings, uniforms)
    for row, setting in enumerate(settings):
        alone = draw(logits[row : row + 1], [setting], [uniforms[row]])
        assert alone.tokens_B[0] == together.tokens_B[row]
        assert alone.logprobs_B[0] == together.logprobs_B[row]


@pytest.mark.parametrize("vocab", [1, 2, 255, 256, 257, 1000])
def test_the_draw_is_the_inverse_of_the_distribution_function(vocab: int) -> None:
    logits = random_logits(1, vocab)
    ends = torch.softmax(logits[0].double(), -1).cumsum(-1)
    uniforms = np.random.default_rng(1).random(50)
    drawn = draw(logits.expand(50, -1), [RowSettings()] * 50, uniforms.tolist())
    expected = torch.searchsorted(ends, torch.from_numpy(uniforms), right=True).clamp(max=vocab - 1)
    assert torch.equal(drawn.tokens_B, expected)


@pytest.mark.parametrize("settings", [RowSettings(), RowSettings(top_k=600), RowSettings(top_p=0.999999)])
def test_a_token_without_probability_is_never_drawn(settings: RowSettings) -> None:
    logits = torch.full((2, 700), -math.inf)
    logits[:, 300:310] = 0.0
    tokens = draw(logits, [settings] * 2, [0.0, 1 - 2**-53]).tokens_B
    assert all(300 <= token < 310 for token in tokens.tolist())


def test_a_nucleus_wider_than_the_first_candidates_reaches_every_token_it_holds() -> None:
    logits = torch.zeros(1, 5000)  # uniform: the nucleus of 0.9 holds 4,500 tokens
    uniforms = np.linspace(0, 0.9999, 400).tolist()
    tokens = draw(logits.expand(400, -1), [RowSettings(top_p=0.9)] * 400, uniforms).tokens_B
    assert len(set(tokens.tolist())) == 400


def test_the_nucleus_after_top_k_is_that_of_the_renormalised_distribution() -> None:
    probabilities = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
    # Of the top two, the first holds 4/7 > 0.55 of their mass, so it alone is the nucleus.
    drawn = draw(probabilities.log(), [RowSettings(top_k=2, top_p=0.55)], [0.9999])
    assert drawn.tokens_B.tolist() == [0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    "settings", [RowSettings(), RowSettings(temperature=0), RowSettings(top_k=3), RowSettings(top_p=0.5)]
)
def test_logits_that_are_not_finite_are_reported_and_do_not_touch_other_rows(
    bad: float, settings: RowSettings
) -> None:
    logits = random_logits(2)
    clean = draw(logits, [settings] * 2, [0.4, 0.4])
    logits[0, 5] = bad
    drawn = draw(logits, [settings] * 2, [0.4, 0.4])
    assert drawn.finite_B.tolist() == [False, True]
    assert drawn.tokens_B[1] == clean.tokens_B[1]


def test_very_low_temperatures_stay_finite() -> None:
    logits = 20 * random_logits(1)
    drawn = draw(logits, [RowSettings(1e-6)], [0.5])
    assert drawn.tokens_B[0] == logits[0].argmax()
    assert drawn.logprobs_B.item() == 0.0


def test_scaled_logprobs_at_temperature_one_are_a_plain_log_softmax() -> None:
    logits = random_logits(2)
    assert torch.equal(scaled_logprobs(logits, [1.0, 0.0]), torch.log_softmax(logits, -1))


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63, 2**64 - 1, 2**100])
def test_the_same_seed_gives_the_same_numbers_and_other_samples_differ(seed: int) -> None:
    first = sample_rng(seed, 0).random(4).tolist()
    assert sample_rng(seed, 0).random(4).tolist() == first
    assert sample_rng(seed, 1).random(4).tolist() != first
    assert sample_rng(seed + 1, 0).random(4).tolist() != first


def test_a_negative_seed_is_not_its_absolute_value() -> None:
    assert sample_rng(-5, 0).random() != sample_rng(5, 0).random()


def test_without_a_seed_every_sample_is_fresh() -> None:
    assert sample_rng(None, 0).random() != sample_rng(None, 0).random()


@pytest.mark.parametrize("min_p", [0.02, 0.2, 1.0])
def test_min_p_draws_only_tokens_close_to_the_most_probable_one(min_p: float) -> None:
    logits = random_logits(200)
    settings = [RowSettings(0.9, min_p=min_p)] * len(logits)
    drawn = draw(logits, settings, np.random.default_rng(0).random(len(logits)).tolist())
    probabilities = torch.softmax(logits.double() / 0.9, -1)
    chosen = probabilities.gather(1, drawn.tokens_B[:, None])[:, 0]
    assert (chosen >= min_p * probabilities.amax(-1) * (1 - 1e-6)).all()
    expected = chosen.log()
    torch.testing.assert_close(drawn.logprobs_B.double(), expected, atol=1e-4, rtol=1e-5)


def test_the_nucleus_is_that_of_what_min_p_leaves() -> None:
    logits = torch.tensor([[0.50, 0.30, 0.15, 0.05]]).log()
    setting = RowSettings(top_p=0.6, min_p=0.4)  # leaves 0.50 and 0.30, which become 0.625 and 0.375
    uniforms = np.linspace(0, 0.999, 50).tolist()
    drawn = draw(logits.expand(50, -1).contiguous(), [setting] * 50, uniforms)
    assert set(drawn.tokens_B.tolist()) == {0}
