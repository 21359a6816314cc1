"""The sampler's budget for keys and values: it is kept, work waits for it, and no result changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.unit.engine.kernels.cores import CORES
from tests.unit.engine.sampler.harness import finish, job, random_tokens, sample, trained_adapter
from tinkex.engine.model.tokenizer import EngineTokenizer
from tinkex.engine.model.transformer import Transformer
from tinkex.engine.sampler.job import SampleJob
from tinkex.engine.sampler.kv_cache import bytes_per_token
from tinkex.engine.sampler.sampler import Sampler
from tinkex.errors import InvalidInput

WAYS = ["torch", *(["compiled"] if CORES else [])]


@pytest.fixture(params=WAYS)
def compute(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Samplers:
    """Makes samplers with a budget that is counted in tokens."""

    def __init__(self, model: Transformer, tokenizer: EngineTokenizer, compute: str) -> None:
        self.model = model
        self._tokenizer = tokenizer
        self._compute: str = compute

    def of(self, budget_tokens: int, **options: Any) -> Sampler:
        budget = budget_tokens * bytes_per_token(self.model.arch, self.model.dtype)
        return Sampler(self.model, self._tokenizer, kv_budget_bytes=budget, compute=self._compute, **options)


@pytest.fixture
def samplers(model: Transformer, tokenizer: EngineTokenizer, compute: str) -> Samplers:
    return Samplers(model, tokenizer, compute)


def hungry(number: int, **options: Any) -> list[SampleJob]:
    """Jobs that outgrow a small budget together, each with its own random numbers."""
    return [
        job(random_tokens(20 + 10 * n, n), num_samples=1 + n % 3, max_tokens=90, seed=n, stop=[], **options)
        for n in range(number)
    ]


def outputs(results: dict[str, Any], jobs: Sequence[SampleJob]) -> list[list[tuple[list[int], list[float]]]]:
    return [[(s.tokens, s.logprobs) for s in results[each.request_id].sequences] for each in jobs]


def test_all_memory_is_given_back_when_nothing_is_kept(samplers: Samplers) -> None:
    sampler = samplers.of(100_000, prompt_cache_bytes=0)
    finish(sampler, hungry(5))
    assert sampler.kv_bytes == 0


@pytest.mark.slow
@pytest.mark.parametrize("budget_tokens", [450, 600, 1500])
def test_a_small_budget_makes_work_wait_and_changes_no_result(samplers: Samplers, budget_tokens: int) -> None:
    jobs = [*hungry(4), *hungry(3, prompt_logprobs=True)]
    tight = finish(samplers.of(budget_tokens, prefill_chunk=32), jobs)
    roomy = finish(samplers.of(100_000), jobs)
    for got, wanted in zip(outputs(tight, jobs), outputs(roomy, jobs), strict=True):
        assert [tokens for tokens, _ in got] == [tokens for tokens, _ in wanted]
        for (_, logprobs), (_, expected) in zip(got, wanted, strict=True):
            np.testing.assert_allclose(logprobs, expected, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("budget_tokens", [850, 1000, 2000])
def test_the_budget_is_kept_at_every_step(samplers: Samplers, budget_tokens: int) -> None:
    sampler = samplers.of(budget_tokens, prefill_chunk=32)
    budget = budget_tokens * bytes_per_token(samplers.model.arch, samplers.model.dtype)
    for n in range(12):
        sampler.add(job(random_tokens(20 + 10 * n, n), num_samples=2, max_tokens=150, seed=n, stop=[]))
    while sampler.busy:
        sampler.step()
        assert sampler.kv_bytes <= budget


@pytest.mark.slow
@pytest.mark.skipif("compiled" not in WAYS, reason="the package was installed without its compiled core")
def test_a_sequence_that_gave_way_gets_the_bits_of_an_undisturbed_run(
    model: Transformer, tokenizer: EngineTokenizer
) -> None:
    """Tokens and logprobs; also with an adapter, and drawn from a truncated distribution."""
    adapter = trained_adapter(model, 4, 1)
    jobs = [*hungry(4), *hungry(3, adapter=adapter, top_p=0.9, temperature=0.8)]
    samplers = Samplers(model, tokenizer, "compiled")
    crowded = samplers.of(450, prefill_chunk=32)
    disturbed = finish(crowded, jobs)
    assert crowded.num_preemptions > 3
    for each, got in zip(jobs, outputs(disturbed, jobs), strict=True):
        calm = samplers.of(100_000)
        assert got == outputs(finish(calm, [each]), [each])[0]
        assert calm.num_preemptions == 0


def test_new_sequences_wait_until_running_ones_have_ended(samplers: Samplers) -> None:
    needed = samplers.of(100_000).limits.sizes.peak_tokens(180, 2)
    sampler = samplers.of(needed, prompt_cache_bytes=0)
    running = job(random_tokens(60, 1), max_tokens=50, seed=1, stop=[])
    waiting = job(random_tokens(180, 2), max_tokens=2, seed=2, stop=[])
    sampler.add(running)
    for _ in range(3):
        sampler.step()
    sampler.add(waiting)
    order: list[str] = []
    while not order:
        order += [request_id for request_id, _ in sampler.step()]
        assert sampler.kv_bytes <= 192 * bytes_per_token(samplers.model.arch, samplers.model.dtype)
    order += finish(sampler)
    assert order == [running.request_id, waiting.request_id]
    assert sampler.num_preemptions == 0


def test_cached_prompts_are_evicted_before_running_sequences(samplers: Samplers, compute: str) -> None:
    kept = random_tokens(150, 1)
    sampler = samplers.of({"torch": 700, "compiled": 600}[compute])  # room for both that run, and little more
    sample(sampler, kept, max_tokens=1)
    assert sample(sampler, kept, max_tokens=1).prompt_cache_hit_tokens == 150
    finish(sampler, [job(random_tokens(60, n), max_tokens=100, stop=[]) for n in (2, 3)])
    assert sampler.num_preemptions == 0
    assert sample(sampler, kept, max_tokens=1).prompt_cache_hit_tokens == 0


@pytest.mark.slow
def test_a_prompt_that_could_only_begin_with_a_kept_one_drops_it_instead_of_waiting_for_ever(
    samplers: Samplers,
) -> None:
    head = random_tokens(150, 1)
    longer = job(head + random_tokens(20, 2), max_tokens=40, seed=1, stop=[])
    tight = samplers.of(samplers.of(100_000).limits.sizes.peak_tokens(170, 40))
    sample(tight, head, max_tokens=1)
    assert (
        outputs(finish(tight, [longer]), [longer])[0][0][0]
        == (outputs(finish(samplers.of(100_000), [longer]), [longer])[0][0][0])
    )


def test_a_request_that_could_never_fit_is_rejected_with_a_hint(samplers: Samplers) -> None:
    sampler = samplers.of(300)
    greedy = job(random_tokens(60, 1), max_tokens=200)
    for reject in (sampler.check, sampler.add):
        with pytest.raises(InvalidInput, match=r"max_tokens is 200.*room for \d+ new tokens.*kv_cache_bytes"):
            reject(greedy)
    with pytest.raises(InvalidInput, match="prompt has 301 tokens"):
        sampler.check(job(random_tokens(301, 1), max_tokens=1))
    assert not sampler.busy


def test_a_prompt_that_fills_the_budget_still_gets_its_one_token(samplers: Samplers) -> None:
    response = sample(samplers.of(300), random_tokens(300, 1), max_tokens=1, stop=[], prompt_logprobs=True)
    assert len(response.sequences[0].tokens) == 1


def test_what_the_rejection_says_would_fit_does(samplers: Samplers) -> None:
    sampler = samplers.of(300)
    with pytest.raises(InvalidInput) as rejected:
        sampler.check(job(random_tokens(60, 1), max_tokens=200))
    room = int(str(rejected.value).split("room for ")[1].split()[0])
    assert len(sample(sampler, random_tokens(60, 1), max_tokens=room, stop=[]).sequences[0].tokens) == room
    with pytest.raises(InvalidInput):
        sampler.check(job(random_tokens(60, 1), max_tokens=room + 1))


def test_without_max_tokens_a_sequence_gets_as_many_as_fit(samplers: Samplers) -> None:
    [sequence] = sample(samplers.of(300), random_tokens(60, 1), stop=[]).sequences
    assert sequence.stop_reason == "length"
    assert 20 < len(sequence.tokens) < 240


@pytest.mark.skipif("compiled" not in WAYS, reason="the package was installed without its compiled core")
def test_samples_of_one_prompt_share_its_memory(model: Transformer, tokenizer: EngineTokenizer) -> None:
    sampler = Samplers(model, tokenizer, "compiled").of(100_000)
    sampler.add(job(random_tokens(400, 1), num_samples=16, max_tokens=20, stop=[]))
    peak = 0
    while sampler.busy:
        sampler.step()
        peak = max(peak, sampler.kv_bytes)
    each = 64  # tokens of a slot that holds the end of the prompt and twenty more
    assert peak == (400 + 16 * each) * bytes_per_token(model.arch, model.dtype)
    sampler.add(job(random_tokens(400, 2), num_samples=3, max_tokens=20, stop=[], request_id="gone"))
    for _ in range(4):
        sampler.step()
    sampler.cancel("gone")
    assert sampler.kv_bytes == 2 * 400 * bytes_per_token(
        model.arch, model.dtype
    )  # both prompts kept for later
