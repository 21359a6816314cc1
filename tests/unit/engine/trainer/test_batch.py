"""Packing keeps every example, whole, next to its job's others, and within the budget."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.engine.model.forest_attention import Node
from tinkex.engine.trainer.batch import RECOMPUTED_ROWS, PackedBatch, pack_batches
from tinkex.engine.trainer.examples import Example


def example(length: int, *, targets: int = 1, value: float = 0.0) -> Example:
    size = length * targets
    return Example(
        tokens_N=np.arange(length),
        targets=np.arange(size),
        inputs={"weights": np.full(size, value, dtype=np.float32)},
        shape=(length,) if targets == 1 else (length, targets),
    )


def members(passes: list[PackedBatch]) -> list[tuple[int, int]]:
    return sorted((m.job, m.index) for p in passes for m in p.members)


@pytest.mark.parametrize("budget", [1, 5, 16, 1000])
def test_every_example_runs_exactly_once(budget: int) -> None:
    tenants = [{0: [example(n) for n in (3, 9, 4, 4)]}, {1: [example(n) for n in (5, 1)]}]
    passes = pack_batches(tenants, budget)
    assert members(passes) == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]


def test_passes_stay_within_the_budget_unless_one_example_is_longer() -> None:
    passes = pack_batches([{0: [example(n) for n in (3, 9, 4, 4, 20)]}], 10)
    for packed in passes:
        assert len(packed.tokens_T) <= 10 or len(packed.members) == 1


def test_a_batch_just_over_the_budget_is_split_evenly() -> None:
    sizes = [len(p.tokens_T) for p in pack_batches([{0: [example(10)] * 12}], 100)]
    assert sizes == [60, 60]


def test_a_jobs_rows_lie_together_and_equal_lengths_are_neighbours() -> None:
    [packed] = pack_batches([{0: [example(n) for n in (4, 9, 4)]}, {1: [example(4)]}], 100)
    assert [(m.job, m.index) for m in packed.members] == [(0, 0), (0, 2), (0, 1), (1, 0)]
    assert [(s.tenant, s.rows) for s in packed.segments] == [(0, slice(0, 17)), (1, slice(17, 21))]
    assert [(p.job, p.targets) for p in packed.parts] == [(0, slice(0, 17)), (1, slice(17, 21))]
    assert [node.length for node in packed.nodes] == [4, 4, 9, 4]
    assert packed.positions_T.tolist() == [*range(4), *range(4), *range(9), *range(4)]


def test_targets_of_different_widths_share_a_pass() -> None:
    [packed] = pack_batches([{0: [example(2, targets=3, value=1.0), example(3, value=2.0)]}], 100)
    assert packed.first_target_T1.tolist() == [0, 3, 6, 7, 8, 9]
    assert next(packed.parts).inputs["weights"].tolist() == [1.0] * 6 + [2.0] * 3
    assert packed.targets_P.tolist() == [*range(6), *range(3)]


def with_tokens(*tokens: int) -> Example:
    return Example(np.array(tokens), np.array(tokens), {}, (len(tokens),))


def answers(prompt: int, *lengths: int, first: int = 1000) -> list[Example]:
    """Examples that begin with the same ``prompt`` tokens."""
    starts = range(first, first + 1000 * len(lengths), 1000)
    return [
        with_tokens(*range(first, first + prompt), *range(start + 500, start + 500 + length))
        for start, length in zip(starts, lengths, strict=True)
    ]


def test_a_common_prefix_has_one_row_per_token() -> None:
    [packed] = pack_batches([{0: [with_tokens(1, 2, 3), with_tokens(1, 2, 4, 5)]}], 100, min_saved=1)
    assert packed.tokens_T.tolist() == [1, 2, 3, 4, 5]
    assert packed.positions_T.tolist() == [0, 1, 2, 2, 3]
    assert packed.nodes == (Node(0, 2, 5), Node(2, 3, 3), Node(3, 5, 5))
    assert packed.targets_P.tolist() == [1, 2, 3, 1, 2, 4, 5]
    assert packed.targets_by_row_P.tolist() == [0, 3, 1, 4, 2, 5, 6]
    assert packed.first_target_T1.tolist() == [0, 2, 4, 5, 6, 7]


def test_a_copy_and_a_prefix_add_no_rows_that_are_there() -> None:
    data = [with_tokens(1, 2, 3, 4), with_tokens(1, 2), with_tokens(1, 2, 3, 4)]
    [packed] = pack_batches([{0: data}], 100, min_saved=1)
    assert packed.tokens_T.tolist() == [1, 2, 3, 4]
    assert packed.nodes == (Node(0, 2, 4), Node(2, 4, 4))


def test_adapters_share_nothing() -> None:
    data = [with_tokens(1, 2, 3)]
    [packed] = pack_batches([{0: data}, {1: data}], 100, min_saved=1)
    assert packed.tokens_T.tolist() == [1, 2, 3, 1, 2, 3]
    assert [segment.rows for segment in packed.segments] == [slice(0, 3), slice(3, 6)]


def test_jobs_of_one_adapter_share_rows_and_keep_their_targets_together() -> None:
    first, second, third = answers(10, 3, 5, 4)
    [packed] = pack_batches([{0: [first, third], 1: [second]}], 100, min_saved=1)
    assert len(packed.tokens_T) == 10 + 3 + 5 + 4
    assert [(p.job, p.targets) for p in packed.parts] == [(0, slice(0, 27)), (1, slice(27, 42))]
    assert packed.segments[0].rows_by_job == {0: 10 + 3 + 4, 1: 5}


def test_a_tree_stays_in_one_batch_if_it_fits() -> None:
    data = [*answers(50, 10, 10, 10), *answers(60, 10, 10, first=9000)]
    batches = pack_batches([{0: data}], 100, min_saved=8)
    assert [len(batch.tokens_T) for batch in batches] == [80, 80]


def test_a_tree_that_exceeds_the_budget_is_cut_where_that_repeats_fewest_rows() -> None:
    system = tuple(range(10))
    data = [
        with_tokens(*system, *range(group, group + 30), *range(group + 100 * n, group + 100 * n + 10))
        for group in (1000, 2000, 3000, 4000)
        for n in range(1, 4)
    ]
    batches = pack_batches([{0: data}], 140, min_saved=8)
    assert [len(batch.tokens_T) for batch in batches] == [10 + 2 * 60, 10 + 2 * 60]


def test_a_tree_stays_whole_beyond_the_budget_if_that_computes_less() -> None:
    long_prompt = answers(90, 5, 5, 5, 5, 5, 5)  # six batches of 95 rows, or one of 120
    small = answers(20, 10, 10, first=9000)
    batches = pack_batches([{0: [*long_prompt, *small]}, {0: small}], 100, min_saved=8)
    assert [len(batch.tokens_T) for batch in batches] == [80, 120]


def test_a_prompt_longer_than_the_budget_is_shared() -> None:
    batches = pack_batches([{0: answers(300, *[10] * 8)}], 100, min_saved=8)
    assert [len(batch.tokens_T) for batch in batches] == [380]


def test_a_tree_too_large_to_be_recomputed_is_cut_into_large_batches() -> None:
    batches = pack_batches([{0: answers(90, *[10] * 50)}], 100, min_saved=8)
    assert [len(batch.tokens_T) for batch in batches] == [300, 380]


@given(
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=8), min_size=1, max_size=12),
    st.integers(1, 30),
    st.integers(1, 4),
)
def test_the_rows_of_every_example_are_its_tokens(
    sequences: list[list[int]], budget: int, min_saved: int
) -> None:
    data = [with_tokens(*tokens) for tokens in sequences]
    batches = pack_batches([{0: data[::2], 1: data[1::2]}], budget, min_saved=min_saved)
    assert members(batches) == sorted((n % 2, n // 2) for n in range(len(data)))
    for packed in batches:
        lengths = [member.example.num_tokens for member in packed.members]
        assert len(packed.tokens_T) <= max(budget * RECOMPUTED_ROWS, *lengths)
        row_of_target = np.empty(len(packed.targets_P), dtype=np.int64)
        row_of_target[packed.targets_by_row_P] = np.repeat(
            np.arange(len(packed.tokens_T)), np.diff(packed.first_target_T1)
        )
        assert packed.tokens_T[row_of_target].tolist() == packed.targets_P.tolist()
        for part in packed.parts:
            positions = [n for member in part.members for n in range(member.example.num_tokens)]
            assert packed.positions_T[row_of_target[part.targets]].tolist() == positions
