"""The sampler's logprobs against a plain full forward over prompt and output."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.unit.engine.sampler.harness import (
    finish,
    full_logits,
    job,
    one_thread,
    random_tokens,
    sample,
    trained_adapter,
)
from tinkex.engine.model.loader import load_transformer
from tinkex.engine.model.lora import Adapter
from tinkex.engine.model.tokenizer import EngineTokenizer
from tinkex.engine.model.transformer import Transformer
from tinkex.engine.sampler.sampler import Sampler
from tinkex.engine.trainer.trainer import Trainer, TrainJob, TrainState
from tinkex.types import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    LoraConfig,
    ModelInput,
    SampleResponse,
    TensorData,
)

pytestmark = pytest.mark.slow

__all__ = ["one_thread"]

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Transformer:
    return load_transformer(tiny_model)


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> EngineTokenizer:
    return EngineTokenizer(tiny_model)


def assert_logprobs_hold(
    model: Transformer,
    prompt: list[int],
    response: SampleResponse,
    temperature: float = 1.0,
    adapter: Adapter | None = None,
) -> None:
    """Every reported number of every sequence, recomputed without cache, batch or chunks."""
    for sequence in response.sequences:
        rows = full_logits(model, prompt + sequence.tokens, adapter)[len(prompt) - 1 : -1]
        expected = torch.log_softmax(rows.double() / (temperature or 1.0), -1)
        own = expected.gather(1, torch.tensor(sequence.tokens)[:, None])[:, 0]
        np.testing.assert_allclose(sequence.logprobs, own, atol=TOLERANCE, rtol=0)
        if sequence.topk_logprobs_np is not None:
            k = sequence.topk_logprobs_np.logprobs.shape[1]
            np.testing.assert_allclose(
                sequence.topk_logprobs_np.logprobs, expected.topk(k).values, atol=TOLERANCE, rtol=0
            )
            listed = expected.gather(
                1, torch.from_numpy(sequence.topk_logprobs_np.token_ids.astype(np.int64))
            )
            np.testing.assert_allclose(sequence.topk_logprobs_np.logprobs, listed, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("temperature", [0, 0.3, 1.0, 2.5])
@pytest.mark.parametrize(
    "truncation", [{}, {"top_k": 5}, {"top_p": 0.8}, {"top_k": 50, "top_p": 0.5}], ids=str
)
def test_logprobs_are_those_of_the_scaled_distribution(
    model: Transformer, tokenizer: EngineTokenizer, temperature: float, truncation: dict[str, float]
) -> None:
    prompt = random_tokens(30, 1)
    response = sample(
        Sampler(model, tokenizer),
        prompt,
        num_samples=3,
        max_tokens=25,
        seed=1,
        stop=[],
        temperature=temperature,
        topk_sample_logprobs=4,
        **truncation,
    )
    assert_logprobs_hold(model, prompt, response, temperature)


@pytest.mark.slow
def test_logprobs_hold_in_a_full_batch_of_many_adapters(
    model: Transformer, tokenizer: EngineTokenizer
) -> None:
    adapters = [None, *(trained_adapter(model, rank, rank) for rank in (1, 4, 16))]
    jobs = [
        job(
            random_tokens(5 + 11 * n, n),
            adapter=adapters[n % 4],
            num_samples=1 + n % 3,
            max_tokens=10 + 7 * n,
            seed=n,
            stop=[],
            prompt_logprobs=True,
        )
        for n in range(12)
    ]
    results = finish(Sampler(model, tokenizer, prefill_chunk=24, max_batch=7), jobs)
    for each in jobs:
        response = results[each.request_id]
        prompt = each.prompt_P.tolist()
        assert_logprobs_hold(model, prompt, response, adapter=each.adapter)
        rows = torch.log_softmax(full_logits(model, prompt, each.adapter), -1)[:-1]
        expected = rows.gather(1, torch.tensor(prompt)[1:, None])[:, 0]
        np.testing.assert_allclose(response.prompt_logprobs_np[1:], expected, atol=TOLERANCE, rtol=0)


def test_many_adapters_in_one_batch_draw_what_each_draws_alone(
    model: Transformer, tokenizer: EngineTokenizer
) -> None:
    adapters = [None, *(trained_adapter(model, rank, rank) for rank in (2, 4, 8))]
    prompt = random_tokens(20, 1)
    jobs = [
        job(prompt, adapter=adapter, seed=3, max_tokens=20, stop=[]) for adapter in adapters for _ in range(2)
    ]
    together = finish(Sampler(model, tokenizer), jobs)
    tokens = [together[each.request_id].sequences[0].tokens for each in jobs]
    for each, got in zip(jobs, tokens, strict=True):
        alone = finish(Sampler(model, tokenizer), [each])[each.request_id]
        assert got == alone.sequences[0].tokens
    assert len({tuple(got) for got in tokens}) == len(adapters)


def train(trainer: Trainer, state: TrainState, tokens: list[int]) -> None:
    """One step that changes the weights clearly."""
    datum = Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": TensorData(tokens[1:], "int64")})
    [output] = trainer.run([TrainJob(state, [datum], "cross_entropy")])
    assert isinstance(output, ForwardBackwardOutput), output
    trainer.optim_step(state, AdamParams(learning_rate=0.05))


@pytest.mark.slow
def test_a_snapshot_is_sampled_unchanged_while_training_continues(
    model: Transformer, tokenizer: EngineTokenizer
) -> None:
    trainer = Trainer(model)
    state = trainer.create(LoraConfig(rank=4, seed=0))
    train(trainer, state, random_tokens(30, 5))
    snapshot = trainer.snapshot(state)
    prompt = random_tokens(20, 1)
    before = sample(Sampler(model, tokenizer), prompt, adapter=snapshot, seed=3, max_tokens=20, stop=[])
    sampler = Sampler(model, tokenizer)
    watched = job(prompt, adapter=snapshot, seed=3, max_tokens=20, stop=[])
    sampler.add(watched)
    results: dict[str, object] = {}
    while sampler.busy:
        results.update(sampler.step())
        train(trainer, state, random_tokens(30, 5))
    after = results[watched.request_id]
    assert isinstance(after, SampleResponse)
    assert after.sequences[0].tokens == before.sequences[0].tokens
    assert_logprobs_hold(model, prompt, after, adapter=snapshot)
    moved_on = sample(sampler, prompt, adapter=trainer.snapshot(state), seed=3, max_tokens=20, stop=[])
    assert moved_on.prompt_cache_hit_tokens == 0
    assert moved_on.sequences[0].logprobs != after.sequences[0].logprobs


def test_sampler_and_trainer_agree_on_logprobs(model: Transformer, tokenizer: EngineTokenizer) -> None:
    trainer = Trainer(model)
    state = trainer.create(LoraConfig(rank=4, seed=0))
    train(trainer, state, random_tokens(30, 5))
    prompt = random_tokens(20, 1)
    response = sample(
        Sampler(model, tokenizer),
        prompt,
        adapter=trainer.snapshot(state),
        num_samples=4,
        max_tokens=40,
        stop=[],
        prompt_logprobs=True,
    )
    for sequence in response.sequences:
        tokens = prompt + sequence.tokens
        datum = Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": TensorData(tokens[1:], "int64")})
        [output] = trainer.run([TrainJob(state, [datum], "cross_entropy", backward=False)])
        assert isinstance(output, ForwardBackwardOutput), output
        trained = output.loss_fn_outputs[0]["logprobs"].to_numpy()
        assert response.prompt_logprobs_np is not None
        sampled = np.concatenate([response.prompt_logprobs_np[1:], sequence.logprobs or []])
        np.testing.assert_allclose(sampled, trained, atol=TOLERANCE, rtol=0)


def test_greedy_decoding_follows_the_full_forward(model: Transformer, tokenizer: EngineTokenizer) -> None:
    prompt = random_tokens(10, 1)
    tokens = list(prompt)
    for _ in range(30):
        tokens.append(int(full_logits(model, tokens)[-1].argmax()))
    response = sample(Sampler(model, tokenizer), prompt, temperature=0, max_tokens=30, stop=[])
    assert response.sequences[0].tokens == tokens[10:]
