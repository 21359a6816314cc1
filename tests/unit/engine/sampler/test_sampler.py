from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.engine.sampler.harness import (
    ScriptedModel,
    finish,
    job,
    random_tokens,
    sample,
    trained_adapter,
)
from tinkex.engine.model.tokenizer import EngineTokenizer
from tinkex.engine.model.transformer import Transformer
from tinkex.engine.sampler.job import SampleJob
from tinkex.engine.sampler.kv_cache import bytes_per_token
from tinkex.engine.sampler.sampler import Sampler
from tinkex.errors import Conflict, NumericalError
from tinkex.types import SampleResponse

EOS = 2


def scripted(
    model: Transformer, tokenizer: EngineTokenizer, output: list[int]
) -> tuple[Sampler, ScriptedModel]:
    """A sampler on a model that says ``output`` after a prompt of one token, then EOS for ever."""
    script = ScriptedModel(model.arch, [5, *output, EOS])
    return Sampler(script, tokenizer), script


def of(result: object) -> SampleResponse:
    assert isinstance(result, SampleResponse), result
    return result


# -- how sequences end ---------------------------------------------------------------------------------------


def test_a_sequence_stops_at_the_end_token_and_keeps_it(
    model: Transformer, tokenizer: EngineTokenizer
) -> None:
    sampler, _ = scripted(model, tokenizer, [10, 11])
    [sequence] = sample(sampler, [5], max_tokens=50, temperature=0).sequences
    assert (sequence.tokens, sequence.stop_reason) == ([10, 11, EOS], "stop")


def test_a_sequence_ends_at_max_tokens(model: Transformer, tokenizer: EngineTokenizer) -> None:
    sampler, _ = scripted(model, tokenizer, [10, 11, 12, 13])
    [sequence] = sample(sampler, [5], max_tokens=3, temperature=0).sequences
    assert (sequence.tokens, sequence.stop_reason) == ([10, 11, 12], "length")


def test_an_end_token_at_the_last_allowed_place_is_a_stop(
    model: Transformer, tokenizer: EngineTokenizer
) -> None:
    sampler, _ = scripted(model, tokenizer, [10])
    [sequence] = sample(sampler, [5], max_tokens=2, temperature=0).sequences
    assert (sequence.tokens, sequence.stop_reason) == ([10, EOS], "stop")


def test_an_empty_stop_list_continues_past_the_end_token(
    model: Transformer, tokenizer: EngineTokenizer
) -> None:
    sampler, _ = scripted(model, tokenizer, [10])
    [sequence] = sample(sampler, [5], max_tokens=4, temperature=0, stop=[]).sequences
    assert (sequence.tokens, sequence.stop_reason) == ([10, EOS, EOS, EOS], "length")


def test_a_stop_token_stops_and_is_kept(model: Transformer, tokenizer: EngineTokenizer) -> None:
    sampler, _ = scripted(model, tokenizer, [10, 11, 12])
    [sequence] = sample(sampler, [5], temperature=0, stop=[300, 11]).sequences
    assert (sequence.tokens, sequence.stop_reason) == ([10, 11], "stop")


def test_a_stop_string_across_tokens_stops_and_all_its_tokens_are_kept(
    model: Transformer, tokenizer: EngineTokenizer
) -> None:
    text = "It costs 5 € in all, no more."
    output = tokenizer.encode(text, add_special_tokens=False)
    sampler, _ = scripted(model, tokenizer, output)
    for stop in ["€", "5 € in", ", no m", ["xyz", "all"]]:
        [sequence] = sample(sampler, [5], temperature=0, stop=stop).sequences
        said = tokenizer.decode(sequence.tokens)
        wanted = stop if isinstance(stop, str) else "all"
        assert sequence.stop_reason == "stop"
        assert sequence.tokens == output[: len(sequence.tokens)]
        assert wanted in said
        assert wanted not in tokenizer.decode(sequence.tokens[:-1])


def test_the_end_token_stops_also_beside_stop_strings(model: Transformer, tokenizer: EngineTokenizer) -> None:
    sampler, _ = scripted(model, tokenizer, [10])
    [sequence] = sample(sampler, [5], temperature=0, stop="never said").sequences
    assert (sequence.tokens, sequence.stop_reason) == ([10, EOS], "stop")


def test_without_max_tokens_a_sequence_grows_to_the_context_limit(
    sampler: Sampler, model: Transformer
) -> None:
    [sequence] = sample(sampler, random_tokens(480, 1), stop=[]).sequences
    assert (len(sequence.tokens), sequence.stop_reason) == (model.arch.max_context - 480, "length")


def test_max_tokens_beyond_the_context_end_at_the_context_limit(sampler: Sampler) -> None:
    [sequence] = sample(sampler, random_tokens(500, 1), stop=[], max_tokens=100).sequences
    assert (len(sequence.tokens), sequence.stop_reason) == (12, "length")


def test_a_prompt_that_fills_the_context_still_gets_one_token(sampler: Sampler) -> None:
    response = sample(sampler, random_tokens(512, 1), stop=[], max_tokens=9, prompt_logprobs=True)
    assert len(response.sequences[0].tokens) == 1
    assert len(response.prompt_logprobs or []) == 512


# -- seeds ---------------------------------------------------------------------------------------------------


def test_samples_of_one_seed_differ_and_are_the_same_set_again(
    model: Transformer, tokenizer: EngineTokenizer
) -> None:
    def draw_set() -> list[list[int]]:
        response = sample(
            Sampler(model, tokenizer), [5, 6], num_samples=5, seed=2**70, max_tokens=12, stop=[]
        )
        return [sequence.tokens for sequence in response.sequences]

    first = draw_set()
    assert first == draw_set()
    assert len({tuple(tokens) for tokens in first}) == 5


def test_a_seed_gives_the_same_samples_whatever_else_is_in_the_batch(
    model: Transformer, tokenizer: EngineTokenizer
) -> None:
    prompt = random_tokens(20, 3)
    alone = sample(Sampler(model, tokenizer), prompt, num_samples=2, seed=11, max_tokens=20, stop=[])
    busy = Sampler(model, tokenizer, prefill_chunk=16, max_batch=6)
    others = [
        job(random_tokens(5 + 9 * n, n), max_tokens=5 + n, seed=n, top_p=0.9, stop=[]) for n in range(8)
    ]
    watched = job(prompt, num_samples=2, seed=11, max_tokens=20, stop=[])
    results = finish(busy, [*others[:4], watched, *others[4:]])
    together = of(results[watched.request_id])
    assert [s.tokens for s in together.sequences] == [s.tokens for s in alone.sequences]


def test_without_a_seed_two_calls_differ(sampler: Sampler) -> None:
    drawn = [sample(sampler, [5], max_tokens=20, stop=[]).sequences[0].tokens for _ in range(2)]
    assert drawn[0] != drawn[1]


# -- results -------------------------------------------------------------------------------------------------


def test_sequences_come_in_the_order_of_their_ids(sampler: Sampler) -> None:
    response = sample(sampler, [5, 6], num_samples=4, max_tokens=3, request_id="r")
    assert [sequence.sequence_id for sequence in response.sequences] == ["r-0", "r-1", "r-2", "r-3"]


def test_types_are_those_of_the_protocol(sampler: Sampler) -> None:
    response = sample(sampler, [5, 6], max_tokens=3, topk_sample_logprobs=2, prompt_logprobs=True, stop=[])
    [sequence] = response.sequences
    assert sequence.tokens_np.dtype == np.int32
    assert sequence.logprobs_np is not None
    assert sequence.topk_logprobs_np is not None
    assert response.prompt_logprobs_np is not None
    assert sequence.logprobs_np.dtype == sequence.topk_logprobs_np.logprobs.dtype == np.float32
    assert sequence.topk_logprobs_np.token_ids.shape == (3, 2)
    assert sequence.topk_logprobs_np.token_ids.dtype == np.int32
    assert response.prompt_logprobs_np.dtype == np.float32
    assert response.prompt_alt_tokens is None


def test_a_greedy_token_is_the_first_of_its_topk(sampler: Sampler) -> None:
    [sequence] = sample(
        sampler, [5, 6], max_tokens=10, temperature=0, topk_sample_logprobs=3, stop=[]
    ).sequences
    assert sequence.topk_logprobs is not None
    assert [row[0][0] for row in sequence.topk_logprobs if row] == sequence.tokens
    assert [row[0][1] for row in sequence.topk_logprobs if row] == sequence.logprobs


# -- the batch -----------------------------------------------------------------------------------------------


def test_more_samples_than_the_batch_holds_all_finish(model: Transformer, tokenizer: EngineTokenizer) -> None:
    sampler = Sampler(model, tokenizer, max_batch=3)
    response = sample(sampler, [5, 6, 7], num_samples=10, max_tokens=6, seed=1, stop=[])
    reference = sample(Sampler(model, tokenizer), [5, 6, 7], num_samples=10, max_tokens=6, seed=1, stop=[])
    assert [s.tokens for s in response.sequences] == [s.tokens for s in reference.sequences]


def test_a_short_request_finishes_while_a_long_prompt_is_prefilled(
    model: Transformer, tokenizer: EngineTokenizer
) -> None:
    sampler = Sampler(model, tokenizer, prefill_chunk=32)
    long, short = (
        job(random_tokens(400, 1), max_tokens=1, stop=[]),
        job(random_tokens(8, 2), max_tokens=5, stop=[]),
    )
    sampler.add(long)
    sampler.step()
    sampler.add(short)
    order = []
    while sampler.busy:
        order += [request_id for request_id, _ in sampler.step()]
    assert order == [short.request_id, long.request_id]


def test_decoding_continues_between_the_chunks_of_a_long_prompt(
    model: Transformer, tokenizer: EngineTokenizer
) -> None:
    script = ScriptedModel(model.arch, [9] * 600)
    sampler = Sampler(script, tokenizer, prefill_chunk=50)
    sampler.add(job([5], max_tokens=100, stop=[]))
    sampler.step()
    script.rows_per_pass.clear()
    sampler.add(job(random_tokens(200, 1), max_tokens=1, stop=[]))
    for _ in range(8):
        sampler.step()
    assert script.rows_per_pass == [1, 50, 1, 50, 1, 50, 1, 50]


def test_sequences_join_and_leave_at_every_step(model: Transformer, tokenizer: EngineTokenizer) -> None:
    jobs = [job(random_tokens(3 + 7 * n, n), max_tokens=1 + 5 * n, seed=n, stop=[]) for n in range(9)]
    sampler = Sampler(model, tokenizer, max_batch=4, prefill_chunk=20)
    results: dict[str, object] = {}
    pending = list(jobs)
    while pending or sampler.busy:
        if pending:
            sampler.add(pending.pop(0))
        results.update(sampler.step())
    for each in jobs:
        alone = finish(Sampler(model, tokenizer), [each])[each.request_id]
        assert of(results[each.request_id]).sequences[0].tokens == of(alone).sequences[0].tokens


def test_the_number_of_sequences_counts_those_in_line(model: Transformer, tokenizer: EngineTokenizer) -> None:
    sampler = Sampler(model, tokenizer, max_batch=2)
    assert (sampler.busy, sampler.num_sequences) == (False, 0)
    sampler.add(job([5], num_samples=3, max_tokens=2, stop=[]))
    sampler.add(job([6], num_samples=2, max_tokens=2, stop=[]))
    assert (sampler.busy, sampler.num_sequences) == (True, 5)
    finish(sampler)
    assert (sampler.busy, sampler.num_sequences) == (False, 0)


def test_a_user_with_many_sequences_does_not_keep_another_one_waiting(
    model: Transformer, tokenizer: EngineTokenizer
) -> None:
    options: dict[str, Any] = {"stop": [], "seed": 1}
    many = job([5, 6], num_samples=30, max_tokens=40, owner="ada", **options)
    few = job([7, 8], num_samples=2, max_tokens=4, owner="bob", **options)
    sampler = Sampler(model, tokenizer, max_batch=2)
    sampler.add(many)
    for _ in range(5):
        assert not sampler.step()
    sampler.add(few)
    results: dict[str, object] = {}
    for _ in range(90):  # one of the first two sequences ends meanwhile; all of them take 600 steps
        results.update(sampler.step())
    assert set(results) == {few.request_id}
    results.update(finish(sampler))
    for each in (many, few):
        alone = finish(Sampler(model, tokenizer), [each])[each.request_id]
        got = [sequence.tokens for sequence in of(results[each.request_id]).sequences]
        assert got == [sequence.tokens for sequence in of(alone).sequences]


def test_a_request_id_in_use_is_rejected(sampler: Sampler) -> None:
    sampler.add(job([5], request_id="twice"))
    with pytest.raises(Conflict, match="'twice'"):
        sampler.add(job([5], request_id="twice"))


def test_rows_of_one_adapter_are_neighbours_in_every_pass(
    model: Transformer, tokenizer: EngineTokenizer
) -> None:
    script = ScriptedModel(model.arch, [9] * 600)
    adapters = [None, trained_adapter(model, 1, 1), trained_adapter(model, 1, 2)]
    jobs = [job(random_tokens(10 + n, n), adapter=adapters[n % 3], max_tokens=5, stop=[]) for n in range(9)]
    sampler = Sampler(script, tokenizer)
    for each in jobs[:6]:
        sampler.add(each)
        sampler.step()
    finish(sampler, jobs[6:])
    assert max(script.segments_per_pass) == len(adapters)


# -- cancel and failure --------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 6])
def test_a_cancelled_request_is_gone_wherever_it_was(
    model: Transformer, tokenizer: EngineTokenizer, steps: int
) -> None:
    sampler = Sampler(model, tokenizer, prefill_chunk=16, max_batch=2, prompt_cache_bytes=0)
    doomed = job(random_tokens(30, 1), num_samples=5, max_tokens=50, stop=[])
    other = job(random_tokens(10, 2), max_tokens=30, seed=4, stop=[])
    sampler.add(doomed)
    sampler.add(other)
    for _ in range(steps):
        sampler.step()
    assert sampler.cancel(doomed.request_id)
    assert not sampler.cancel(doomed.request_id)
    results = finish(sampler)
    assert list(results) == [other.request_id]
    alone = finish(Sampler(model, tokenizer), [other])[other.request_id]
    assert of(results[other.request_id]).sequences[0].tokens == of(alone).sequences[0].tokens
    assert sampler.kv_bytes == 0


def test_a_request_whose_weights_diverged_fails_alone(model: Transformer, tokenizer: EngineTokenizer) -> None:
    broken = trained_adapter(model, rank=2, seed=1)
    broken.params[:200] = torch.nan
    sampler = Sampler(model, tokenizer)
    ill = job(random_tokens(20, 1), adapter=broken, num_samples=3, max_tokens=5)
    well = [job(random_tokens(20, n), max_tokens=60, seed=n, stop=[]) for n in range(3)]
    results = finish(sampler, [well[0], ill, *well[1:]])
    assert isinstance(results[ill.request_id], NumericalError)
    assert "earlier checkpoint" in str(results[ill.request_id])
    for each in well:
        alone = finish(Sampler(model, tokenizer), [each])[each.request_id]
        assert of(results[each.request_id]).sequences[0].tokens == of(alone).sequences[0].tokens


# -- prompts in memory ---------------------------------------------------------------------------------------


def test_a_prompt_seen_before_is_not_computed_again(model: Transformer, tokenizer: EngineTokenizer) -> None:
    script = ScriptedModel(model.arch, [9] * 600)
    sampler = Sampler(script, tokenizer)
    prompt = random_tokens(100, 1)
    assert sample(sampler, prompt, max_tokens=1, stop=[]).prompt_cache_hit_tokens == 0
    assert script.rows_per_pass == [100]
    assert sample(sampler, prompt, max_tokens=1, stop=[]).prompt_cache_hit_tokens == 100
    assert script.rows_per_pass == [100]
    assert sample(sampler, [*prompt, 7, 8], max_tokens=1, stop=[]).prompt_cache_hit_tokens == 100
    assert script.rows_per_pass == [100, 2]
    assert sample(sampler, prompt[:60], max_tokens=1, stop=[]).prompt_cache_hit_tokens == 59
    assert script.rows_per_pass == [100, 2, 1]


def test_requests_with_one_prompt_that_arrive_together_compute_it_once(
    model: Transformer, tokenizer: EngineTokenizer
) -> None:
    script = ScriptedModel(model.arch, [9] * 600)
    sampler = Sampler(script, tokenizer, prefill_chunk=64)
    prompt = random_tokens(150, 1)
    results = finish(sampler, [job(prompt, max_tokens=1, stop=[]) for _ in range(16)])
    assert sum(script.rows_per_pass) == 150
    assert sorted(of(result).prompt_cache_hit_tokens for result in results.values()) == [0] + [150] * 15


def test_n_samples_of_one_prompt_share_its_prefill(model: Transformer, tokenizer: EngineTokenizer) -> None:
    script = ScriptedModel(model.arch, [9] * 600)
    sample(Sampler(script, tokenizer), random_tokens(150, 1), num_samples=16, max_tokens=2, stop=[])
    assert script.rows_per_pass == [150, 16]


def test_a_known_prompt_gives_the_same_samples(model: Transformer, tokenizer: EngineTokenizer) -> None:
    prompt = random_tokens(100, 1)
    sampler = Sampler(model, tokenizer)
    options = {"num_samples": 3, "max_tokens": 20, "seed": 5, "stop": []}
    sample(sampler, prompt[:70], max_tokens=1)
    partly_known = sample(sampler, prompt, **options)
    known = sample(sampler, prompt, **options)
    fresh = sample(Sampler(model, tokenizer), prompt, **options)
    assert (partly_known.prompt_cache_hit_tokens, known.prompt_cache_hit_tokens) == (70, 100)
    tokens = [
        [sequence.tokens for sequence in response.sequences] for response in (partly_known, known, fresh)
    ]
    assert tokens[0] == tokens[1] == tokens[2]


def test_prompt_logprobs_of_a_cached_prompt_are_computed_and_reported_as_such(sampler: Sampler) -> None:
    prompt = random_tokens(100, 1)
    sample(sampler, prompt, max_tokens=1)
    again = sample(sampler, prompt, max_tokens=1, prompt_logprobs=True)
    assert again.prompt_cache_hit_tokens == 0
    assert again.prompt_logprobs is not None
    assert None not in again.prompt_logprobs[1:]


def test_a_prompt_is_known_only_to_its_owner(sampler: Sampler) -> None:
    prompt = random_tokens(100, 1)
    asked = [("alice", 0), ("bob", 0), ("alice", 100), ("bob", 100), ("", 0)]
    for owner, expected in asked:
        assert sample(sampler, prompt, owner=owner, max_tokens=1).prompt_cache_hit_tokens == expected


def test_owners_do_not_wait_for_each_others_prompts(model: Transformer, tokenizer: EngineTokenizer) -> None:
    script = ScriptedModel(model.arch, [9] * 600)
    sampler = Sampler(script, tokenizer, prefill_chunk=512)
    prompt = random_tokens(100, 1)
    for owner in ("alice", "bob", "alice"):
        sampler.add(job(prompt, owner=owner, max_tokens=1, stop=[]))
    finish(sampler)
    assert script.rows_per_pass == [200]


def test_a_prompt_is_known_only_under_its_own_adapter(model: Transformer, sampler: Sampler) -> None:
    prompt = random_tokens(100, 1)
    adapter = trained_adapter(model, rank=2, seed=0)
    for weights, expected in [(None, 0), (adapter, 0), (adapter, 100), (None, 100)]:
        assert sample(sampler, prompt, adapter=weights, max_tokens=1).prompt_cache_hit_tokens == expected


# -- all of it together --------------------------------------------------------------------------------------


def random_jobs(model: Transformer, random: Random) -> list[SampleJob]:
    """Requests that share prompts or beginnings or nothing, with all kinds of settings."""
    adapters = [None, trained_adapter(model, 2, 1), trained_adapter(model, 4, 2)]
    heads = [random_tokens(length, length) for length in (20, 40, 90)]
    jobs: list[SampleJob] = []
    for number in range(random.randint(4, 10)):
        prompt = random_tokens(random.randint(1, 60), number)
        if random.random() < 0.6:
            prompt = random.choice(heads) + prompt
        if jobs and random.random() < 0.3:
            prompt = jobs[-1].prompt_P.tolist()
        jobs.append(
            job(
                prompt,
                adapter=random.choice(adapters),
                num_samples=random.choice([1, 1, 2, 5]),
                seed=number,
                max_tokens=random.choice([1, 3, 30, 90]),
                stop=random.choice([None, [], ["th"], [7, 9]]),
                temperature=random.choice([0, 1, 0.7]),
                top_p=random.choice([1, 0.9]),
                top_k=random.choice([-1, 10]),
                prompt_logprobs=random.random() < 0.3,
            )
        )
    return jobs


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_any_mix_of_requests_gives_each_what_it_gets_alone(
    model: Transformer, tokenizer: EngineTokenizer, seed: int
) -> None:
    """Arrivals, cancels, batch, chunk and memory at random: the results are those of each request by itself."""
    random = Random(seed)
    jobs = random_jobs(model, random)
    sampler = Sampler(
        model,
        tokenizer,
        max_batch=random.choice([1, 3, 8, 64]),
        prefill_chunk=random.choice([5, 32, 512]),
        kv_budget_bytes=random.choice([560, 700, 1000, 100_000]) * bytes_per_token(model.arch, model.dtype),
    )
    pending, cancelled, results = list(jobs), set(), {}
    while pending or sampler.busy:
        while pending and random.random() < 0.5:
            sampler.add(pending.pop(0))
        results.update(sampler.step())
        chosen = random.choice(jobs).request_id
        if random.random() < 0.02 and sampler.cancel(chosen):
            cancelled.add(chosen)
    assert set(results) == {each.request_id for each in jobs} - cancelled
    for each in jobs:
        if each.request_id not in cancelled:
            got, alone = (
                of(results[each.request_id]),
                of(finish(Sampler(model, tokenizer), [each])[each.request_id]),
            )
            assert [s.tokens for s in got.sequences] == [s.tokens for s in alone.sequences]
            assert [s.stop_reason for s in got.sequences] == [s.stop_reason for s in alone.sequences]
            if sampler.computes_with.startswith("compiled"):
                assert [s.logprobs for s in got.sequences] == [s.logprobs for s in alone.sequences]
            if each.prompt_logprobs:
                np.testing.assert_allclose(got.prompt_logprobs_np, alone.prompt_logprobs_np, atol=1e-4)
