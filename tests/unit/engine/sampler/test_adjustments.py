"""Penalties and biases, against plain float64 references."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.engine.sampler.harness import full_logits, job, random_tokens, sample
from tinkex.engine.model.transformer import Transformer
from tinkex.engine.sampler.adjustments import LogitAdjustments
from tinkex.engine.sampler.sampler import Sampler
from tinkex.errors import InvalidInput
from tinkex.types import SamplingParams

VOCAB = 24
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=30)


def reference(
    logits: npt.NDArray[np.float64], params: SamplingParams, prompt: list[int], output: list[int]
) -> npt.NDArray[np.float64]:
    """The documented steps, token by token, in float64."""
    adjusted = logits.astype(np.float64).copy()
    repetition = params.repetition_penalty
    for token in set(prompt) | set(output):
        if repetition is not None:
            adjusted[token] *= repetition if adjusted[token] < 0 else 1 / repetition
    for token, number in Counter(output).items():
        adjusted[token] -= (params.presence_penalty or 0.0) + (params.frequency_penalty or 0.0) * number
    for token, bias in (params.logit_bias or {}).items():
        adjusted[token] += bias
    return adjusted


@given(
    prompt=TOKENS,
    output=TOKENS,
    seed=st.integers(0, 1000),
    presence=st.none() | st.floats(-2, 2),
    frequency=st.none() | st.floats(-2, 2),
    repetition=st.none() | st.floats(0.01, 100),
    bias=st.none() | st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100)),
)
def test_adjusted_logits_equal_a_float64_reference(
    prompt: list[int],
    output: list[int],
    seed: int,
    presence: float | None,
    frequency: float | None,
    repetition: float | None,
    bias: dict[int, float] | None,
) -> None:
    params = SamplingParams(
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=repetition,
        logit_bias=bias,
    )
    logits = np.random.default_rng(seed).normal(0, 5, VOCAB).astype(np.float32)
    adjustments = LogitAdjustments(params, np.array(prompt, np.int32))
    for token in output:
        adjustments.append(token)
    expected = reference(logits.astype(np.float64), params, prompt, output)
    adjustments.apply(logits)
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    "neutral",
    [
        {},
        {"min_p": 0.0},
        {"presence_penalty": 0.0, "frequency_penalty": 0.0},
        {"repetition_penalty": 1.0},
        {"logit_bias": {}},
    ],
)
def test_neutral_options_change_nothing_and_cost_nothing(neutral: dict[str, Any]) -> None:
    assert LogitAdjustments.of(SamplingParams(**neutral), np.array([1], np.int32), None) is None


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_left_to_the_draw(value: float) -> None:
    logits = np.array([value, 1.0], np.float32)
    adjustments = LogitAdjustments(SamplingParams(logit_bias={1: 5.0}), np.array([0], np.int32))
    adjustments.apply(logits)
    np.testing.assert_array_equal(logits, np.array([value, 1.0], np.float32))


OPTIONS: dict[str, dict[str, Any]] = {
    "presence": {"presence_penalty": 2.0},
    "frequency": {"frequency_penalty": 1.5},
    "repetition": {"repetition_penalty": 1.7},
    "bias": {"logit_bias": {11: 4.0, 12: -100.0}},
    "all": {
        "presence_penalty": -1.0,
        "frequency_penalty": 1.0,
        "repetition_penalty": 1.2,
        "logit_bias": {30: 2.0},
    },
}


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("options", OPTIONS)
def test_samples_are_drawn_and_scored_by_the_adjusted_distribution(
    sampler: Sampler, model: Transformer, options: str, temperature: float
) -> None:
    prompt = random_tokens(8, 1)
    params = SamplingParams(temperature=temperature, **OPTIONS[options])
    [sequence] = sample(
        sampler, prompt, max_tokens=12, seed=3, stop=[], temperature=temperature, **OPTIONS[options]
    ).sequences
    assert sequence.logprobs is not None
    logits = full_logits(model, prompt + sequence.tokens).double().numpy()
    for step, token in enumerate(sequence.tokens):
        adjusted = reference(logits[len(prompt) - 1 + step], params, prompt, sequence.tokens[:step])
        scaled = adjusted / (temperature or 1.0)
        expected = scaled[token] - np.logaddexp.reduce(scaled)
        assert sequence.logprobs[step] == pytest.approx(expected, abs=1e-4)
        if temperature == 0:
            assert adjusted[token] == pytest.approx(adjusted.max(), abs=1e-4)


def test_a_strong_bias_decides_and_a_strong_ban_excludes(sampler: Sampler) -> None:
    prompt = random_tokens(8, 2)
    forced = sample(sampler, prompt, max_tokens=5, temperature=0, stop=[], logit_bias={77: 100.0})
    assert forced.sequences[0].tokens == [77] * 5
    [free] = sample(sampler, prompt, max_tokens=1, temperature=0, stop=[]).sequences
    [banned] = sample(
        sampler, prompt, max_tokens=1, temperature=0, stop=[], logit_bias={free.tokens[0]: -100.0}
    ).sequences
    assert banned.tokens != free.tokens


def test_prompt_logprobs_are_those_of_the_model(sampler: Sampler) -> None:
    prompt = random_tokens(8, 4)
    plain, adjusted = (
        sample(sampler, prompt, max_tokens=1, prompt_logprobs=True, stop=[], **options).prompt_logprobs
        for options in ({}, OPTIONS["all"])
    )
    assert plain == adjusted


def test_other_sequences_of_the_batch_are_unaffected(sampler: Sampler) -> None:
    from tests.unit.engine.sampler.harness import finish

    prompt = random_tokens(9, 5)
    alone = sample(sampler, prompt, max_tokens=20, seed=1, stop=[]).sequences[0]
    free = job(prompt, max_tokens=20, seed=1, stop=[])
    others = [job(prompt, max_tokens=20, seed=n, stop=[], **o) for n, o in enumerate(OPTIONS.values())]
    together = finish(sampler, [*others[:2], free, *others[2:]])[free.request_id].sequences[0]
    assert (together.tokens, together.logprobs) == (alone.tokens, alone.logprobs)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"logit_bias": {10**6: 1.0}}, "1000000"),
        ({"logit_bias": dict.fromkeys(range(1100), 1.0)}, "1024"),
    ],
)
def test_a_bias_that_cannot_be_applied_is_rejected(
    sampler: Sampler, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidInput, match=named):
        sampler.check(job([5], **options))
