"""A machine with less memory than the budget says: steps are tried again, work waits, and no result changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.engine.kernels.cores import CORES
from tests.unit.engine.sampler.harness import finish, job, random_tokens
from tinkex.engine.model.tokenizer import EngineTokenizer
from tinkex.engine.model.transformer import Transformer
from tinkex.engine.sampler.compute import Compute, choose_compute
from tinkex.engine.sampler.job import SampleJob
from tinkex.engine.sampler.logits import RowSettings
from tinkex.engine.sampler.prompt_cache import PromptCache
from tinkex.engine.sampler.request import RunningRequest
from tinkex.engine.sampler.sampler import Sampler
from tinkex.errors import EngineFailure
from tinkex.types import SampleResponse

WAYS = ["torch", *(["compiled"] if CORES else [])]
PLACES = ["prefill", "decode", "logits", "draw", "distribution", "add", "grow", "allocate", "response"]


class Shortage:
    """Has calls fail as torch does when there is no memory: those whose number ``hits`` says."""

    def __init__(self, hits: Callable[[int], bool]) -> None:
        self._hits = hits
        self._calls = 0
        self.num_failed = 0

    def at(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **more: Any) -> Any:
            self._calls += 1
            if self._hits(self._calls):
                self.num_failed += 1
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate a lot")
            return method(*arguments, **more)

        return called


@pytest.fixture(params=WAYS)
def compute(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make(model: Transformer, tokenizer: EngineTokenizer, compute: str) -> Callable[[], Sampler]:
    return lambda: Sampler(model, tokenizer, prefill_chunk=32, prompt_cache_bytes=0, compute=compute)


def jobs() -> list[SampleJob]:
    """Some that decode for several blocks, some that share a prompt, one with more samples than are drawn together."""
    return [
        job(random_tokens(20, 1), num_samples=3, max_tokens=90, seed=1, stop=[], topk_sample_logprobs=2),
        job(random_tokens(70, 2), num_samples=2, max_tokens=70, seed=2, stop=[], prompt_logprobs=True),
        job(random_tokens(70, 2), max_tokens=70, seed=3, stop=[]),
        job(random_tokens(40, 3), num_samples=140, max_tokens=2, seed=4, stop=[], topk_sample_logprobs=1),
        job(random_tokens(9, 4), max_tokens=1, seed=5, prompt_alt_tokens_k=2),
    ]


def drawn(results: dict[str, Any], asked: Sequence[SampleJob]) -> list[list[int]]:
    for each in asked:
        assert isinstance(results[each.request_id], SampleResponse), results[each.request_id]
    return [sequence.tokens for each in asked for sequence in results[each.request_id].sequences]


def put(
    compute: Compute, vocab_size: int, place: str, shortage: Shortage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Has one kind of call run short."""
    cls: type
    if place in {"prefill", "decode", "logits", "draw"}:
        cls = type(compute)
    elif place in {"add", "grow"}:
        cls = type(compute.new_decode_cache())
    elif place == "allocate":
        cls = PromptCache
    elif place == "distribution":
        cls = type(compute.draw(torch.zeros(1, vocab_size), [RowSettings(1.0, -1, 1.0)], [0.5]))
    else:
        cls = RunningRequest
    monkeypatch.setattr(cls, place, shortage.at(getattr(cls, place)))


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("every", [2, 3])
def test_wherever_memory_runs_out_every_request_completes(
    make: Callable[[], Sampler],
    model: Transformer,
    compute: str,
    place: str,
    every: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = jobs()
    expected = finish(make(), asked)
    sampler = make()
    enough = 2 if place != "allocate" else 1  # who is alone, and still does not fit, has to fail
    shortage = Shortage(
        lambda number: number % every == 0 and len(sampler._memory_holders()) >= enough  # noqa: SLF001
    )
    put(choose_compute(model, compute), model.arch.vocab_size, place, shortage, monkeypatch)
    results = finish(sampler, asked)
    monkeypatch.undo()
    assert shortage.num_failed
    assert drawn(results, asked) == drawn(expected, asked)
    for each in asked:
        got, wanted = results[each.request_id], expected[each.request_id]
        for one, other in zip(got.sequences, wanted.sequences, strict=True):
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
        if each.prompt_logprobs:
            np.testing.assert_allclose(got.prompt_logprobs_np, wanted.prompt_logprobs_np, atol=1e-4)
    assert sampler.num_sequences == 0
    assert not sampler.kv_bytes


@pytest.mark.slow
def test_what_does_not_fit_even_alone_fails_alone(
    make: Callable[[], Sampler], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [job(random_tokens(20 + n, n), max_tokens=20, seed=n, stop=[]) for n in range(4)]
    expected = finish(make(), asked)
    sampler = make()
    large = len(asked[2].prompt_P)
    allocate = PromptCache.allocate

    def scarce(prompts: PromptCache, adapter: Any, tokens_P: Any, *more: Any) -> Any:
        if len(tokens_P) == large:
            raise MemoryError
        return allocate(prompts, adapter, tokens_P, *more)

    monkeypatch.setattr(PromptCache, "allocate", scarce)
    results = finish(sampler, asked)
    failure = results.pop(asked[2].request_id)
    assert isinstance(failure, EngineFailure)
    assert f"{large} tokens needs more memory than is free" in str(failure)
    del asked[2]
    assert drawn(results, asked) == drawn(expected, asked)


def test_errors_that_are_not_about_memory_are_not_held_back(
    make: Callable[[], Sampler], model: Transformer, compute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = make()

    def broken(*_: Any) -> Any:
        raise RuntimeError("shapes differ")

    monkeypatch.setattr(type(choose_compute(model, compute)), "prefill", broken)
    with pytest.raises(RuntimeError, match="shapes differ"):
        finish(sampler, jobs())
