"""Packing keeps every example, whole, next to its job's others, and within the budget."""

from __future__ import annotations

import numpy as np
import pytest

from tinkex.engine.trainer.batch import PackedBatch, pack_batches
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
    jobs = [(0, [example(n) for n in (3, 9, 4, 4)]), (1, [example(n) for n in (5, 1)])]
    passes = pack_batches(jobs, budget)
    assert members(passes) == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]


def test_passes_stay_within_the_budget_unless_one_example_is_longer() -> None:
    passes = pack_batches([(0, [example(n) for n in (3, 9, 4, 4, 20)])], 10)
    for packed in passes:
        assert len(packed.tokens_T) <= 10 or len(packed.members) == 1


def test_a_batch_just_over_the_budget_is_split_evenly() -> None:
    sizes = [len(p.tokens_T) for p in pack_batches([(0, [example(10)] * 12)], 100)]
    assert sizes == [60, 60]


def test_a_jobs_rows_lie_together_and_equal_lengths_are_neighbours() -> None:
    [packed] = pack_batches([(0, [example(n) for n in (4, 9, 4)]), (1, [example(4)])], 100)
    assert [(m.job, m.index) for m in packed.members] == [(0, 0), (0, 2), (0, 1), (1, 0)]
    assert [(s.job, s.rows, s.targets) for s in packed.segments] == [
        (0, slice(0, 17), slice(0, 17)),
        (1, slice(17, 21), slice(17, 21)),
    ]
    assert packed.lengths == [4, 4, 9, 4]
    assert packed.positions_T.tolist() == [*range(4), *range(4), *range(9), *range(4)]


def test_targets_of_different_widths_share_a_pass() -> None:
    [packed] = pack_batches([(0, [example(2, targets=3, value=1.0), example(3, value=2.0)])], 100)
    assert packed.first_target_T1.tolist() == [0, 3, 6, 7, 8, 9]
    assert packed.segments[0].inputs["weights"].tolist() == [1.0] * 6 + [2.0] * 3
    assert packed.targets_P.tolist() == [*range(6), *range(3)]
