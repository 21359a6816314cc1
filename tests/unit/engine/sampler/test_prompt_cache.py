from __future__ import annotations

import gc
import weakref

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.unit.engine.sampler.harness import random_tokens, trained_adapter
from tinkex.engine.model.transformer import Transformer
from tinkex.engine.sampler.kv_cache import bytes_per_token
from tinkex.engine.sampler.prompt_cache import MIN_SHARED, CachedPrompt, PromptCache, PromptMatch


def tokens(*parts: list[int]) -> npt.NDArray[np.int32]:
    return np.array([token for part in parts for token in part], np.int32)


def cache(model: Transformer, keep_tokens: int = 10_000) -> PromptCache:
    return PromptCache(
        model.arch, model.dtype, keep_bytes=keep_tokens * bytes_per_token(model.arch, model.dtype)
    )


def fill(prompt: CachedPrompt) -> CachedPrompt:
    prompt.kv.filled = prompt.kv.length
    prompt.kv.last_hidden_D = torch.zeros(1)
    return prompt


def kept(prompts: PromptCache, content: npt.NDArray[np.int32]) -> CachedPrompt:
    prompt = fill(prompts.allocate(None, content, PromptMatch()))
    prompts.release(prompt)
    return prompt


HEAD, ONE, OTHER = list(range(3, 43)), list(range(100, 130)), list(range(200, 230))


def test_the_longest_common_beginning_is_found(model: Transformer) -> None:
    prompts = cache(model)
    short, long = kept(prompts, tokens(HEAD)), kept(prompts, tokens(HEAD, ONE))
    match = prompts.match(None, tokens(HEAD, ONE[:10], OTHER), limit=79)
    assert (match.source, match.available) == (long, 50)
    match = prompts.match(None, tokens(HEAD, OTHER), limit=20)
    assert match.available == 20
    assert match.source in {short, long}


def test_a_beginning_too_short_to_pay_is_not_shared(model: Transformer) -> None:
    prompts = cache(model)
    kept(prompts, tokens(HEAD))
    assert prompts.match(None, tokens(HEAD[: MIN_SHARED - 1], ONE), limit=40) == PromptMatch()
    assert prompts.match(None, tokens(HEAD), limit=MIN_SHARED - 1) == PromptMatch()


def test_another_adapter_shares_nothing(model: Transformer) -> None:
    prompts = cache(model)
    kept(prompts, tokens(HEAD))
    adapter = trained_adapter(model, rank=2, seed=0)
    assert prompts.match(adapter, tokens(HEAD), limit=39).source is None
    assert prompts.acquire_exact(adapter, tokens(HEAD)) is None


def test_a_prompt_in_progress_lends_what_it_has_and_announces_the_rest(model: Transformer) -> None:
    prompts = cache(model)
    running = prompts.allocate(None, tokens(HEAD, ONE), PromptMatch())
    match = prompts.match(None, tokens(HEAD, OTHER), limit=69)
    assert (match.available, match.pending, match.worth_waiting) == (0, 40, True)
    running.kv.filled = 30
    match = prompts.match(None, tokens(HEAD, OTHER), limit=69)
    assert (match.source, match.available, match.worth_waiting) == (running, 30, False)
    assert prompts.acquire_exact(None, tokens(HEAD, ONE)) is None


def test_an_opened_prompt_starts_with_a_copy_of_what_matched(model: Transformer) -> None:
    prompts = cache(model)
    source = prompts.allocate(None, tokens(HEAD), PromptMatch())
    source.kv.kv_L2KPd.normal_(generator=torch.Generator().manual_seed(0))
    fill(source)
    opened = prompts.allocate(None, tokens(HEAD, ONE), prompts.match(None, tokens(HEAD, ONE), limit=69))
    assert opened.kv.filled == 40
    assert torch.equal(opened.kv.kv_L2KPd[..., :40, :], source.kv.kv_L2KPd)


def test_the_least_recently_used_prompt_goes_first_and_used_ones_stay(model: Transformer) -> None:
    prompts = cache(model, keep_tokens=100)
    first, second = kept(prompts, tokens(HEAD)), kept(prompts, tokens(ONE))
    assert prompts.acquire_exact(None, tokens(HEAD)) is first  # and now it has a user
    kept(prompts, tokens(OTHER))
    kept(prompts, tokens(random_tokens(60, 9)))
    assert prompts.acquire_exact(None, tokens(ONE)) is None
    assert prompts.acquire_exact(None, tokens(HEAD)) is first
    assert second.users == 0


def test_bytes_are_those_of_all_prompts_in_memory(model: Transformer) -> None:
    prompts = cache(model)
    running = prompts.allocate(None, tokens(HEAD), PromptMatch())
    kept(prompts, tokens(ONE))
    assert prompts.nbytes == 70 * bytes_per_token(model.arch, model.dtype)
    assert prompts.evict()
    assert not prompts.evict()
    assert prompts.nbytes == running.kv.nbytes == prompts.cost(40)


@pytest.mark.parametrize("complete", [True, False])
def test_a_prompt_that_was_abandoned_halfway_is_not_kept(model: Transformer, complete: bool) -> None:
    prompts = cache(model)
    prompt = prompts.allocate(None, tokens(HEAD), PromptMatch())
    if complete:
        fill(prompt)
    prompts.release(prompt)
    assert (prompts.nbytes > 0) == complete


@pytest.mark.slow
def test_a_prompt_does_not_keep_its_adapter_alive_and_goes_with_it(model: Transformer) -> None:
    prompts = cache(model)
    adapter = trained_adapter(model, rank=2, seed=0)
    prompts.release(fill(prompts.allocate(adapter, tokens(HEAD), PromptMatch())))
    alive = weakref.ref(adapter)
    del adapter
    gc.collect()
    assert alive() is None
    opened = prompts.allocate(None, tokens(ONE), PromptMatch())
    assert prompts.nbytes == opened.kv.nbytes
