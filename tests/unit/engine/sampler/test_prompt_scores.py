from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch

from tests.unit.engine.sampler.harness import full_logits, job, random_tokens, sample
from tinkex.engine.model.tokenizer import EngineTokenizer
from tinkex.engine.model.transformer import Transformer
from tinkex.engine.sampler.prompt_cache import MIN_SHARED
from tinkex.engine.sampler.prompt_scores import PromptScores
from tinkex.engine.sampler.sampler import Sampler
from tinkex.types import SampleResponse, TensorData
from tinkex.types.sampling import EMPTY_LOGPROB

PROMPT = random_tokens(50, seed=4)


@pytest.fixture
def expected(model: Transformer) -> torch.Tensor:
    """Row i: logprobs of what comes after prompt token i."""
    return torch.log_softmax(full_logits(model, PROMPT), -1)


def test_prompt_logprobs_are_at_temperature_one_and_the_first_is_nan(
    sampler: Sampler, expected: torch.Tensor
) -> None:
    got = sample(sampler, PROMPT, max_tokens=1, temperature=0.3, prompt_logprobs=True).prompt_logprobs_np
    assert got is not None
    assert np.isnan(got[0])
    np.testing.assert_allclose(
        got[1:], expected[:-1].gather(1, torch.tensor(PROMPT)[1:, None])[:, 0], atol=1e-4
    )


@pytest.mark.parametrize("last_n", [1, 2, 49, 50, 80])
def test_only_the_last_prompt_logprobs_are_shown(
    sampler: Sampler, expected: torch.Tensor, last_n: int
) -> None:
    options = {"prompt_logprobs": True, "prompt_logprobs_last_n": last_n}
    got = sample(sampler, PROMPT, max_tokens=1, **options).prompt_logprobs_np
    assert got is not None
    shown = min(last_n, 49)
    assert np.isnan(got[: 50 - shown]).all()
    wanted = expected[:-1].gather(1, torch.tensor(PROMPT)[1:, None])[:, 0]
    np.testing.assert_allclose(got[50 - shown :], wanted[49 - shown :], atol=1e-4)


def test_the_top_k_tokens_of_every_prompt_position_and_none_for_the_first(
    sampler: Sampler, expected: torch.Tensor
) -> None:
    got = sample(sampler, PROMPT, max_tokens=1, topk_prompt_logprobs=3)
    assert got.prompt_logprobs_np is None
    topk = got.topk_prompt_logprobs_np
    assert topk is not None
    assert topk.token_ids.shape == topk.logprobs.shape == (50, 3)
    assert topk.token_ids[0].tolist() == [0, 0, 0]
    assert topk.logprobs[0].tolist() == [EMPTY_LOGPROB] * 3
    best = expected[:-1].topk(3)
    np.testing.assert_allclose(topk.logprobs[1:], best.values, atol=1e-4)
    assert (topk.token_ids[1:] == best.indices.numpy()).mean() > 0.99  # near ties may swap


@pytest.mark.parametrize("last_n", [1, 5, 49])
def test_only_the_last_prompt_positions_have_their_top_k_tokens_shown(
    sampler: Sampler, expected: torch.Tensor, last_n: int
) -> None:
    options = {"prompt_logprobs": True, "prompt_logprobs_last_n": last_n, "topk_prompt_logprobs": 2}
    topk = sample(sampler, PROMPT, max_tokens=1, **options).topk_prompt_logprobs_np
    assert topk is not None
    assert (topk.logprobs[: 50 - last_n] == EMPTY_LOGPROB).all()
    np.testing.assert_allclose(
        topk.logprobs[50 - last_n :], expected[49 - last_n : -1].topk(2).values, atol=1e-4
    )


def test_targets_before_the_shown_logprobs_are_scored_all_the_same(
    sampler: Sampler, expected: torch.Tensor
) -> None:
    wanted = np.full((49, 1), -1, np.int64)
    wanted[3] = 7
    got = sample(
        sampler,
        PROMPT,
        max_tokens=1,
        prompt_logprobs=True,
        prompt_logprobs_last_n=2,
        target_prompt_logprobs=TensorData.from_numpy(wanted),
    )
    assert got.target_prompt_logprobs is not None
    assert got.target_prompt_logprobs.to_numpy()[3, 0] == pytest.approx(expected[3, 7].item(), abs=1e-4)
    assert got.prompt_logprobs_np is not None
    assert np.isnan(got.prompt_logprobs_np[:48]).all()


@pytest.mark.parametrize("sparse", [False, True])
def test_logprobs_of_chosen_targets_skip_empty_cells(
    sampler: Sampler, expected: torch.Tensor, sparse: bool
) -> None:
    wanted = np.full((49, 4), -1, np.int64)
    wanted[3, 0], wanted[3, 1], wanted[20, 2], wanted[48, 0] = 7, 9, 0, 511
    data = TensorData.from_numpy(wanted)
    if sparse:
        data = TensorData([7, 9, 0, 511], "int64", [49, 4], [0] * 4 + [2] * 17 + [3] * 28 + [4], [0, 1, 2, 0])
        assert (data.to_numpy(pad_value=-1) == wanted).all()
    got = sample(sampler, PROMPT, max_tokens=1, target_prompt_logprobs=data).target_prompt_logprobs
    assert got is not None
    assert (got.dtype, got.shape, got.is_sparse) == ("float32", [49, 4], sparse)
    assert got.sparse_crow_indices == data.sparse_crow_indices
    assert got.sparse_col_indices == data.sparse_col_indices
    values = got.to_numpy()
    assert ((values == 0.0) == (wanted == -1)).all()
    for row, column in zip(*np.nonzero(wanted != -1), strict=True):
        assert values[row, column] == pytest.approx(expected[row, wanted[row, column]].item(), abs=1e-4)


def test_scores_are_the_same_whether_or_not_the_prompt_is_known_already(
    model: Transformer, tokenizer: EngineTokenizer
) -> None:
    sampler = Sampler(model, tokenizer, prefill_chunk=7)
    sample(sampler, PROMPT, max_tokens=1)
    known = sample(
        sampler, PROMPT, max_tokens=1, prompt_logprobs=True, prompt_logprobs_last_n=5, topk_prompt_logprobs=2
    )
    fresh = sample(
        Sampler(model, tokenizer), PROMPT, max_tokens=1, prompt_logprobs=True, topk_prompt_logprobs=2
    )
    assert known.prompt_logprobs_np is not None
    assert fresh.prompt_logprobs_np is not None
    np.testing.assert_allclose(known.prompt_logprobs_np[-5:], fresh.prompt_logprobs_np[-5:], atol=1e-5)


@pytest.mark.parametrize("start", ["one after the other", "together"])
def test_logprobs_of_continuations_compute_their_prompt_once(
    model: Transformer, tokenizer: EngineTokenizer, start: str
) -> None:
    sampler = Sampler(model, tokenizer, prefill_chunk=16)
    prompts = [[*PROMPT[:40], *random_tokens(12, seed=seed)] for seed in range(3)] + [PROMPT[:40]]
    got: dict[str, SampleResponse] = {}
    for number, prompt in enumerate(prompts):
        sampler.add(job(prompt, request_id=str(number), max_tokens=1, prompt_logprobs=True))
        while sampler.busy and (start == "one after the other" or number == len(prompts) - 1):
            for request_id, response in sampler.step():
                assert isinstance(response, SampleResponse)
                got[request_id] = response
    for number, prompt in enumerate(prompts):
        alone = Sampler(model, tokenizer)
        wanted = sample(alone, prompt, max_tokens=1, prompt_logprobs=True).prompt_logprobs_np
        mine = got[str(number)].prompt_logprobs_np
        assert mine is not None
        assert wanted is not None
        np.testing.assert_allclose(mine, wanted, atol=1e-5)
        # The last common token has the logprob of the first one that differs, so it is computed again.
        hits = got[str(number)].prompt_cache_hit_tokens
        if start == "one after the other":
            assert hits == (39 if number else 0)
        else:  # the others start when the rest of the first one's prompt is not worth waiting for
            assert 39 - MIN_SHARED < hits <= 39 or not number


@pytest.mark.parametrize("with_logprobs", [True, False])
def test_top_tokens_of_continuations_compute_their_prompt_once(
    model: Transformer, tokenizer: EngineTokenizer, with_logprobs: bool
) -> None:
    sampler = Sampler(model, tokenizer)
    first, *others = [[*PROMPT[:40], *random_tokens(12, seed=seed)] for seed in range(3)]
    sample(sampler, first, max_tokens=1, prompt_logprobs=with_logprobs, topk_prompt_logprobs=4)
    for prompt, k in zip(others, (4, 3), strict=True):  # a shorter table is a part of a longer one
        options = {"max_tokens": 1, "prompt_logprobs": with_logprobs, "topk_prompt_logprobs": k}
        mine, alone = sample(sampler, prompt, **options), sample(Sampler(model, tokenizer), prompt, **options)
        assert (mine.prompt_cache_hit_tokens, alone.prompt_cache_hit_tokens) == (39, 0)
        assert mine.topk_prompt_logprobs_np is not None
        assert alone.topk_prompt_logprobs_np is not None
        np.testing.assert_array_equal(
            mine.topk_prompt_logprobs_np.token_ids, alone.topk_prompt_logprobs_np.token_ids
        )
        np.testing.assert_allclose(
            mine.topk_prompt_logprobs_np.logprobs, alone.topk_prompt_logprobs_np.logprobs, atol=1e-5
        )
        assert (mine.prompt_logprobs_np is not None) == with_logprobs
    more = sample(sampler, first, max_tokens=1, prompt_logprobs=with_logprobs, topk_prompt_logprobs=5)
    assert more.prompt_cache_hit_tokens == 0


def test_what_known_logprobs_lack_is_computed(model: Transformer, tokenizer: EngineTokenizer) -> None:
    sampler = Sampler(model, tokenizer)
    sample(sampler, PROMPT, max_tokens=1, prompt_logprobs=True, prompt_logprobs_last_n=5)
    after_some = sample(sampler, PROMPT, max_tokens=1, prompt_logprobs=True)
    assert after_some.prompt_cache_hit_tokens == 0
    after_all = sample(sampler, PROMPT, max_tokens=1, prompt_logprobs=True, topk_prompt_logprobs=2)
    assert after_all.prompt_cache_hit_tokens == 0
    assert after_some.prompt_logprobs_np is not None
    assert after_all.prompt_logprobs_np is not None
    np.testing.assert_allclose(after_some.prompt_logprobs_np, after_all.prompt_logprobs_np, atol=1e-5)


def test_a_sparse_target_may_skip_a_cell_it_lists(sampler: Sampler, expected: torch.Tensor) -> None:
    data = TensorData([-1, 9], "int64", [49, 10**6], [0] * 21 + [2] * 29, [0, 999_999])
    got = sample(sampler, PROMPT, max_tokens=1, target_prompt_logprobs=data).target_prompt_logprobs
    assert got is not None
    assert got.array[0] == 0.0
    assert got.array[1] == pytest.approx(expected[20, 9].item(), abs=1e-4)


def test_alternatives_have_one_row_for_every_prompt_token_but_the_first(
    sampler: Sampler, expected: torch.Tensor
) -> None:
    got = sample(sampler, PROMPT, max_tokens=1, seed=3, temperature=0.6, prompt_alt_tokens_k=4)
    drawn = got.prompt_alt_tokens
    assert drawn is not None
    assert (drawn.tokens.dtype, drawn.tokens.shape) == ("int64", [49, 4])
    assert (drawn.logprobs.dtype, drawn.logprobs.shape) == ("float32", [49, 4])
    own = expected[:-1].gather(1, drawn.tokens.to_torch())
    np.testing.assert_allclose(drawn.logprobs.to_numpy(), own, atol=1e-4)


def test_alternatives_repeat_with_a_seed_however_the_prompt_is_cut(
    model: Transformer, tokenizer: EngineTokenizer
) -> None:
    options = {"max_tokens": 1, "prompt_alt_tokens_k": 3}

    def drawn(seed: int | None, chunk: int) -> list[list[int]]:
        got = sample(Sampler(model, tokenizer, prefill_chunk=chunk), PROMPT, seed=seed, **options)
        assert got.prompt_alt_tokens is not None
        return got.prompt_alt_tokens.tokens.tolist()

    assert drawn(5, 512) == drawn(5, 7)
    assert drawn(5, 512) != drawn(6, 512)
    assert drawn(None, 512) != drawn(None, 512)


def test_alternatives_leave_the_samples_as_they_are(sampler: Sampler) -> None:
    plain = sample(sampler, PROMPT, max_tokens=8, seed=3, num_samples=2)
    asked = sample(sampler, PROMPT, max_tokens=8, seed=3, num_samples=2, prompt_alt_tokens_k=3)
    assert [s.tokens for s in asked.sequences] == [s.tokens for s in plain.sequences]


def test_greedy_alternatives_are_the_argmax(sampler: Sampler, expected: torch.Tensor) -> None:
    got = sample(sampler, PROMPT, max_tokens=1, temperature=0, prompt_alt_tokens_k=2).prompt_alt_tokens
    assert got is not None
    assert got.tokens.tolist() == expected[:-1].argmax(-1, keepdim=True).expand(-1, 2).tolist()


def test_nothing_is_computed_for_a_prompt_without_prompt_logprobs() -> None:
    scores = PromptScores(job(PROMPT))
    assert list(scores.rows_needed(0, 50)) == []
    assert scores.target_logprobs is None


def test_the_table_of_top_k_tokens_takes_no_memory_while_the_prompt_waits() -> None:
    waiting = job([1] * 2000, topk_prompt_logprobs=1000)  # a table of 16 MB
    tracemalloc.start()
    scores = PromptScores(waiting)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken < 1 << 20
    assert scores.topk is not None
    assert scores.topk.logprobs.shape == (2000, 1000)


def test_a_prompt_of_one_token_has_nothing_to_score(sampler: Sampler) -> None:
    empty = TensorData([], "int64", [0, 3])
    got = sample(
        sampler,
        [5],
        max_tokens=1,
        prompt_logprobs=True,
        topk_prompt_logprobs=2,
        target_prompt_logprobs=empty,
        prompt_alt_tokens_k=2,
    )
    assert got.prompt_logprobs == [None]
    assert got.topk_prompt_logprobs == [None]
    assert got.target_prompt_logprobs is not None
    assert got.target_prompt_logprobs.shape == [0, 3]
    assert got.prompt_alt_tokens is not None
    assert got.prompt_alt_tokens.tokens.shape == [0, 2]
