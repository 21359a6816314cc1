"""Penalties and min-p equal the logits processors of ``transformers``."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper

from tests.unit.engine.kernels.cores import CORES
from tests.unit.engine.sampler.harness import finish, full_logits, job, random_tokens
from tinkex.engine.model.loader import load_transformer
from tinkex.engine.model.tokenizer import EngineTokenizer
from tinkex.engine.sampler.adjustments import LogitAdjustments
from tinkex.engine.sampler.logits import RowSettings, draw
from tinkex.engine.sampler.sampler import Sampler
from tinkex.types import SamplingParams

pytestmark = pytest.mark.slow

VOCAB = 300
WAYS = ["torch", *(["compiled"] if CORES else [])]


@pytest.mark.parametrize("penalty", [0.5, 1.1, 7.0])
def test_the_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        prompt, output = rng.integers(0, VOCAB, 40), rng.integers(0, VOCAB, 25)
        logits = rng.normal(0, 6, VOCAB).astype(np.float32)
        context = torch.from_numpy(np.concatenate([prompt, output]))[None]
        scores = torch.from_numpy(logits.copy())[None]
        expected = RepetitionPenaltyLogitsProcessor(penalty)(context, scores)[0]
        adjustments = LogitAdjustments(SamplingParams(repetition_penalty=penalty), prompt.astype(np.int32))
        for token in output.tolist():
            adjustments.append(token)
        adjustments.apply(logits)
        np.testing.assert_allclose(logits, expected.numpy(), rtol=1e-6)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("min_p", [0.01, 0.1, 0.6])
def test_min_p_keeps_the_tokens_that_transformers_keeps(min_p: float, temperature: float) -> None:
    logits = 3 * torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1))
    nothing = torch.zeros(1, 0, dtype=torch.long)
    scaled = TemperatureLogitsWarper(temperature)(nothing, logits.clone())
    kept = MinPLogitsWarper(min_p)(nothing, scaled)
    expected = torch.softmax(kept.double(), -1)[0]
    number = 20_000
    uniforms = ((np.arange(number) + 0.5) / number).tolist()
    tokens: list[int] = []
    for start in range(0, number, 1000):
        part = uniforms[start : start + 1000]
        settings = [RowSettings(temperature, min_p=min_p)] * len(part)
        tokens += draw(logits.expand(len(part), -1).contiguous(), settings, part).tokens_B.tolist()
    shares = torch.zeros(VOCAB, dtype=torch.float64)
    for token, times in Counter(tokens).items():
        shares[token] = times / number
    # Uniforms at equal distances hit every token in proportion to its probability.
    torch.testing.assert_close(shares, expected, atol=2 / number, rtol=0)


@pytest.mark.parametrize("compute", WAYS)
def test_samples_with_min_p_follow_the_distribution_of_transformers(tiny_model: Path, compute: str) -> None:
    model, tokenizer = load_transformer(tiny_model), EngineTokenizer(tiny_model)
    prompt, temperature, min_p, repetition = random_tokens(7, 1), 0.8, 0.2, 1.4
    logits = full_logits(model, prompt)[-1:]
    context = torch.tensor([prompt])
    scores = RepetitionPenaltyLogitsProcessor(repetition)(context, logits)
    scores = MinPLogitsWarper(min_p)(context, TemperatureLogitsWarper(temperature)(context, scores))
    expected = torch.softmax(scores.double(), -1)[0]
    number, sampler = 2000, Sampler(model, tokenizer, compute=compute)
    jobs = [
        job(
            prompt,
            num_samples=100,
            max_tokens=1,
            seed=seed,
            stop=[],
            temperature=temperature,
            min_p=min_p,
            repetition_penalty=repetition,
        )
        for seed in range(number // 100)
    ]
    results = finish(sampler, jobs)
    drawn = Counter(s.tokens[0] for each in jobs for s in results[each.request_id].sequences)
    assert {token for token in drawn if expected[token] == 0} == set()
    for token, probability in enumerate(expected.tolist()):
        spread = 5 * (probability * (1 - probability) / number) ** 0.5
        assert abs(drawn[token] / number - probability) <= spread + 1e-9
