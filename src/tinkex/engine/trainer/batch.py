"""Packing: the examples of several jobs in batches of packed rows, within a token budget.

Shapes: T packed rows, P target tokens of those rows, K targets per row.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import numpy as np
import numpy.typing as npt

from tinkex.engine.trainer.examples import Example

__all__ = ["PackedBatch", "PackedExample", "Segment", "pack_batches"]

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class PackedExample:
    """One example: datum ``index`` of job number ``job``."""

    job: int
    index: int
    example: Example


@dataclass(frozen=True, eq=False)
class Segment:
    """The rows of one job in a batch; they are consecutive, and so are their targets."""

    job: int
    members: tuple[PackedExample, ...]
    rows: slice
    targets: slice

    @property
    def num_rows(self) -> int:
        """Rows of this job in the batch."""
        return int(self.rows.stop - self.rows.start)

    @cached_property
    def inputs(self) -> Mapping[str, npt.NDArray[np.float32]]:
        """The loss inputs of all target tokens of the segment, by name."""
        names = self.members[0].example.inputs
        return {name: np.concatenate([m.example.inputs[name] for m in self.members]) for name in names}


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """The rows of one forward and backward pass.

    Example:
        >>> [packed] = pack_batches([(0, examples)], max_tokens=4096)
        >>> model.hidden(torch.from_numpy(packed.tokens_T), torch.from_numpy(packed.positions_T), attend)
    """

    members: tuple[PackedExample, ...]
    lengths: list[int]  # of each sequence
    tokens_T: Ints
    positions_T: Ints  # of each row in its own sequence
    targets_P: Ints  # row by row
    first_target_T1: Ints  # where each row's targets begin; one entry more than rows
    segments: tuple[Segment, ...]  # the jobs, in row order

    @classmethod
    def of(cls, members: Sequence[PackedExample]) -> PackedBatch:
        """Packs examples one after the other; those of one job must be consecutive."""
        examples = [member.example for member in members]
        widths = np.concatenate([np.full(e.num_tokens, e.targets_per_position) for e in examples])
        return cls(
            members=tuple(members),
            lengths=[e.num_tokens for e in examples],
            tokens_T=np.concatenate([e.tokens_N for e in examples]),
            positions_T=np.concatenate([np.arange(e.num_tokens) for e in examples]),
            targets_P=np.concatenate([e.targets for e in examples]),
            first_target_T1=np.concatenate([[0], np.cumsum(widths)]),
            segments=_segments(members),
        )

    def without(self, jobs: Collection[int]) -> PackedBatch | None:
        """The same batch without the examples of some jobs; None if it is empty."""
        if not any(segment.job in jobs for segment in self.segments):
            return self
        rest = [member for member in self.members if member.job not in jobs]
        return PackedBatch.of(rest) if rest else None


def _segments(members: Sequence[PackedExample]) -> tuple[Segment, ...]:
    segments, row, target = [], 0, 0
    for job, group in groupby(members, key=lambda member: member.job):
        own = tuple(group)
        next_row = row + sum(m.example.num_tokens for m in own)
        next_target = target + sum(m.example.targets.size for m in own)
        segments.append(Segment(job, own, slice(row, next_row), slice(target, next_target)))
        row, target = next_row, next_target
    return tuple(segments)


def pack_batches(jobs: Sequence[tuple[int, Sequence[Example]]], max_tokens: int) -> list[PackedBatch]:
    """The examples of all jobs in as few batches of at most ``max_tokens`` as their lengths allow.

    The rows of a job stay together, sorted by length, because attention computes neighbours of equal length in one call.
    Batches have about equal sizes, so that none is too small to be efficient. An example longer than the budget gets its
    own batch.

    Example:
        >>> [len(batch.tokens_T) for batch in pack_batches([(0, three_examples_of_100_tokens)], max_tokens=250)]
        [100, 200]
    """
    members = [
        PackedExample(job, index, example)
        for job, examples in jobs
        for index, example in sorted(enumerate(examples), key=lambda entry: entry[1].num_tokens)
    ]
    total = sum(member.example.num_tokens for member in members)
    aim = total / max(1, math.ceil(total / max_tokens))
    passes: list[PackedBatch] = []
    current: list[PackedExample] = []
    size = placed = 0
    for member in members:
        length = member.example.num_tokens
        full = size + length > max_tokens
        # The size is closer to the aim without this example than with it.
        even = placed + length / 2 > aim * (len(passes) + 1)
        if current and (full or even):
            passes.append(PackedBatch.of(current))
            current, size = [], 0
        current.append(member)
        size += length
        placed += length
    if current:
        passes.append(PackedBatch.of(current))
    return passes
