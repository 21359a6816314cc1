"""Packing: the examples of several jobs in batches of packed rows, within a token budget.

Examples of one adapter that begin alike share the rows of their prefix, so a row can have targets of many examples.

Shapes: T packed rows, P target tokens of those rows, K targets per row, N positions of an example.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from tinkex.engine.model.forest_attention import Node
from tinkex.engine.trainer.examples import Example
from tinkex.engine.trainer.prefixes import order_by_prefix

__all__ = ["JobPart", "PackedBatch", "PackedExample", "Segment", "pack_batches"]

Ints = npt.NDArray[np.int64]
Tenant = Mapping[int, Sequence[Example]]
"""The examples of the jobs of one adapter, by the number of the job."""

RECOMPUTED_ROWS = 4
"""Rows of a batch whose layers are recomputed, per row of the budget; such a row takes about a quarter of the memory of another."""
RECOMPUTED_COST = 4 / 3
"""The time that such a row takes, compared with another."""


@dataclass(frozen=True, eq=False)
class PackedExample:
    """One example: datum ``index`` of job number ``job`` of tenant number ``tenant``."""

    tenant: int
    job: int
    index: int
    example: Example
    shared: int = 0
    """The rows that it shares with the example before it, unless that one is in another batch."""

    @property
    def num_new(self) -> int:
        """The rows that it adds to those of the example before it."""
        return self.example.num_tokens - self.shared


@dataclass(frozen=True, eq=False)
class JobPart:
    """The examples of one job in a batch; their targets are consecutive."""

    job: int
    members: tuple[PackedExample, ...]
    targets: slice

    @cached_property
    def inputs(self) -> Mapping[str, npt.NDArray[np.float32]]:
        """The loss inputs of all its target tokens, by name."""
        names = self.members[0].example.inputs
        return {name: np.concatenate([m.example.inputs[name] for m in self.members]) for name in names}


@dataclass(frozen=True, eq=False)
class Segment:
    """The rows of one tenant in a batch; they are consecutive."""

    tenant: int
    rows: slice
    parts: tuple[JobPart, ...]
    rows_by_job: Mapping[int, int]
    """The rows of each job; those that several have count for the first."""

    @property
    def num_rows(self) -> int:
        """Rows of this tenant in the batch."""
        return int(self.rows.stop - self.rows.start)


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """The rows of one forward and backward pass.

    Example:
        >>> [packed] = pack_batches([{0: examples}], max_tokens=4096)
        >>> model.hidden(torch.from_numpy(packed.tokens_T), torch.from_numpy(packed.positions_T), attend)
    """

    members: tuple[PackedExample, ...]  # in the order of their rows
    nodes: tuple[Node, ...]  # the forest of their prefixes, in row order
    tokens_T: Ints
    positions_T: Ints  # of each row in its own sequence
    targets_P: Ints  # job by job, example by example
    targets_by_row_P: Ints  # their numbers, row by row
    first_target_T1: Ints  # where the targets of each row begin among those; one entry more than rows
    segments: tuple[Segment, ...]  # the tenants, in row order

    @classmethod
    def of(cls, members: Sequence[PackedExample]) -> PackedBatch:
        """Packs examples, in the order of their prefixes; those of one tenant must be consecutive."""
        segments = tuple(_segments(members))
        forest = _Forest()
        rows_of = {(m.job, m.index): forest.add(m) for m in members}
        listed = [member for segment in segments for part in segment.parts for member in part.members]
        row_of_target_P = np.concatenate(
            [np.repeat(rows_of[m.job, m.index], m.example.targets_per_position) for m in listed]
        )
        counts_T = np.bincount(row_of_target_P, minlength=forest.num_rows)
        return cls(
            members=tuple(members),
            nodes=forest.nodes(),
            tokens_T=np.concatenate(forest.tokens),
            positions_T=np.concatenate(forest.positions),
            targets_P=np.concatenate([m.example.targets for m in listed]),
            targets_by_row_P=np.argsort(row_of_target_P, kind="stable"),
            first_target_T1=np.concatenate([[0], np.cumsum(counts_T)]),
            segments=segments,
        )

    @property
    def parts(self) -> Iterator[JobPart]:
        """The jobs of all tenants, in the order of their targets."""
        return (part for segment in self.segments for part in segment.parts)

    def without(self, tenants: Collection[int]) -> PackedBatch | None:
        """The same batch without the examples of some tenants; None if it is empty."""
        if not any(segment.tenant in tenants for segment in self.segments):
            return self
        rest = [member for member in self.members if member.tenant not in tenants]
        return PackedBatch.of(rest) if rest else None


class _Forest:
    """Rows of examples that are added in the order of their prefixes."""

    def __init__(self) -> None:
        self.num_rows = 0
        self.tokens: list[Ints] = []
        self.positions: list[Ints] = []
        self._tenant: int | None = None
        self._path_N: Ints = np.empty(0, dtype=np.int64)  # the rows of the last example
        self._starts: dict[int, int] = {}  # the first row of each node, and its position

    def add(self, member: PackedExample) -> Ints:
        """Adds the rows of an example that the one before it does not have; returns all its rows, position by position."""
        shared = member.shared if member.tenant == self._tenant else 0
        tokens_N = member.example.tokens_N
        stop = self.num_rows + len(tokens_N) - shared
        self._path_N = np.concatenate([self._path_N[:shared], np.arange(self.num_rows, stop)])
        if stop > self.num_rows:
            self.tokens.append(tokens_N[shared:])
            self.positions.append(np.arange(shared, len(tokens_N)))
            if shared:  # it leaves the path of the others here, which cuts their node in two
                self._starts.setdefault(int(self._path_N[shared - 1]) + 1, shared)
            self._starts[self.num_rows] = shared
        self.num_rows, self._tenant = stop, member.tenant
        return self._path_N

    def nodes(self) -> tuple[Node, ...]:
        """The nodes, in row order."""
        starts = sorted(self._starts)
        ends = dict.fromkeys(starts, self.num_rows)
        above: list[int] = []  # the nodes on the path to the current one
        for start in starts:
            while above and self._starts[above[-1]] >= self._starts[start]:
                ends[above.pop()] = start
            above.append(start)
        return tuple(Node(start, stop, ends[start]) for start, stop in pairwise([*starts, self.num_rows]))


def _segments(members: Sequence[PackedExample]) -> Iterator[Segment]:
    row = target = 0
    for tenant, group in groupby(members, key=attrgetter("tenant")):
        own = list(group)
        rows_by_job: Counter[int] = Counter({own[0].job: own[0].shared})  # with an earlier batch, so not here
        for member in own:
            rows_by_job[member.job] += member.num_new
        first_row, row = row, row + rows_by_job.total()
        parts = []
        for job, listed in groupby(sorted(own, key=attrgetter("job")), key=attrgetter("job")):
            of_job = tuple(listed)
            first_target = target
            target += sum(member.example.targets.size for member in of_job)
            parts.append(JobPart(job, of_job, slice(first_target, target)))
        yield Segment(tenant, slice(first_row, row), tuple(parts), rows_by_job)


def pack_batches(
    tenants: Sequence[Tenant], max_tokens: int, *, min_saved: int | None = None
) -> list[PackedBatch]:
    """The examples of all tenants in as few batches of at most ``max_tokens`` rows as their lengths allow.

    The rows of a tenant stay together, sorted by length, because attention computes neighbours of equal length in one call.
    Batches have about equal sizes, so that none is too small to be efficient. An example longer than the budget gets its
    own batch. With ``min_saved``, examples of a tenant share prefixes that save as many rows; they stay in one batch unless
    they alone exceed the budget. Then they are separated where that repeats the fewest rows, or have a batch of up to
    ``RECOMPUTED_ROWS`` times the budget, whichever takes less time: the layers of a batch beyond the budget are recomputed.

    Example:
        >>> [len(batch.tokens_T) for batch in pack_batches([{0: three_examples_of_100_tokens}], max_tokens=250)]
        [200, 100]
    """
    members = [
        member for number, tenant in enumerate(tenants) for member in _ordered(number, tenant, min_saved)
    ]
    common: list[PackedExample] = []
    alone: list[Sequence[PackedExample]] = []
    starts = [place for place, member in enumerate(members) if not member.shared]
    for start, stop in pairwise([*starts, len(members)]):
        tree = members[start:stop]
        budget = _budget_of_tree(tree, max_tokens)
        if budget == max_tokens:
            common += tree
        else:
            alone += _cut(tree, budget)
    return [PackedBatch.of(batch) for batch in (*_cut(common, max_tokens), *alone)]


def _budget_of_tree(tree: Sequence[PackedExample], max_tokens: int) -> int:
    """The budget with which a tree takes less time: within that of the pass prefixes are repeated, beyond it layers are."""
    if len(tree) == 1 or sum(member.num_new for member in tree) <= max_tokens:
        return max_tokens

    def cost(budget: int) -> float:
        sizes = [batch[0].shared + sum(member.num_new for member in batch) for batch in _cut(tree, budget)]
        return sum(size * (RECOMPUTED_COST if size > max_tokens else 1) for size in sizes)

    return min(max_tokens, RECOMPUTED_ROWS * max_tokens, key=cost)


def _cut(members: Sequence[PackedExample], max_tokens: int) -> list[Sequence[PackedExample]]:
    """Divides examples into batches of about equal sizes."""
    placed = [0, *accumulate(member.num_new for member in members)]
    aim = placed[-1] / max(1, math.ceil(placed[-1] / max_tokens))
    batches: list[Sequence[PackedExample]] = []
    start = 0
    while start < len(members):
        stop = _next_cut(members, placed, start, max_tokens, aim * (len(batches) + 1))
        batches.append(members[start:stop])
        start = stop
    return batches


def _next_cut(
    members: Sequence[PackedExample], placed: Sequence[int], start: int, max_tokens: int, aim: float
) -> int:
    """Where the batch that begins at ``start`` ends: where fewest rows are repeated, and then closest to the aim."""
    repeated = members[start].shared
    best: tuple[int, float] | None = None
    cut = start + 1
    for stop in range(start + 1, len(members) + 1):
        size = placed[stop] - placed[start] + repeated
        if best is not None and size > max_tokens and members[stop - 1].num_new:
            break
        rank = (members[stop].shared if stop < len(members) else 0, abs(placed[stop] - aim))
        if best is None or rank <= best:
            best, cut = rank, stop
    return cut


def _ordered(number: int, tenant: Tenant, min_saved: int | None) -> Iterator[PackedExample]:
    """The examples of a tenant in the order of their prefixes; without shared ones, job by job."""
    listed = [
        (job, index, example) for job, examples in tenant.items() for index, example in enumerate(examples)
    ]
    order = order_by_prefix([example.tokens_N for _, _, example in listed], min_saved)
    for place, shared in zip(order.numbers, order.shared, strict=True):
        job, index, example = listed[place]
        yield PackedExample(number, job, index, example, shared)
