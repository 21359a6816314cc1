"""Shards: the datums of one pass, cut between the trees of their prefixes, so that several trainers compute it.

Needs no torch. How a pass is cut depends only on its datums and the number of shards, so a replay cuts it in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from tinkex.engine.trainer.prefixes import MIN_SAVED, order_by_prefix
from tinkex.errors import TinkexError
from tinkex.types.losses import ForwardBackwardOutput, LossFnOutput

__all__ = ["ShardResult", "count_shards", "merge_outputs", "plan_shards"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class ShardResult:
    """What a shard computed: its output as of a pass of its own, and its gradient, in a buffer of its own."""

    output: ForwardBackwardOutput | TinkexError
    gradient: Floats | None = field(repr=False)
    """None without a backward pass, or after an error."""
    tokens_computed: int


@dataclass(frozen=True)
class _Tree:
    """Sequences that share prefixes; ``size`` is the number of their distinct tokens."""

    members: Sequence[int]
    size: int


def count_shards(sequences: Sequence[Ints], max_tokens: int, min_saved: int | None = MIN_SAVED) -> int:
    """How many shards of about ``max_tokens`` distinct tokens a pass has; at most one per tree.

    Example:
        >>> count_shards([np.arange(n, n + 100) for n in range(5)], max_tokens=200)
        3
    """
    trees = _trees(sequences, min_saved)
    return min(len(trees), math.ceil(sum(tree.size for tree in trees) / max_tokens))


def plan_shards(
    sequences: Sequence[Ints], num_shards: int, min_saved: int | None = MIN_SAVED
) -> list[list[int]]:
    """The numbers of the sequences of each shard. No tree is divided, and the shards have about equally many distinct tokens.

    The largest tree comes first, each to the shard that has the fewest tokens by then, and of equal ones to the first.

    Example:
        >>> plan_shards([np.arange(n, n + 100) for n in (0, 1, 2)], num_shards=2)
        [[0, 2], [1]]
    """
    shards: list[list[int]] = [[] for _ in range(num_shards)]
    sizes = [0] * num_shards
    for tree in sorted(_trees(sequences, min_saved), key=lambda tree: (-tree.size, min(tree.members))):
        smallest = sizes.index(min(sizes))
        shards[smallest] += tree.members
        sizes[smallest] += tree.size
    return [sorted(shard) for shard in shards if shard]


def merge_outputs(
    shards: Sequence[Sequence[int]], outputs: Sequence[ForwardBackwardOutput]
) -> ForwardBackwardOutput:
    """The output of a whole pass from those of its shards: sums are added, and means are weighted by datums."""
    by_datum: dict[int, LossFnOutput] = {}
    for members, output in zip(shards, outputs, strict=True):
        by_datum |= zip(members, output.loss_fn_outputs, strict=True)
    num_datums = [len(members) for members in shards]
    metrics = {
        name: _reduce(name, [output.metrics[name] for output in outputs], num_datums)
        for name in outputs[0].metrics
    }
    ordered = [by_datum[index] for index in range(len(by_datum))]
    return ForwardBackwardOutput(outputs[0].loss_fn_output_type, ordered, metrics)


def _reduce(name: str, values: Sequence[float], num_datums: Sequence[int]) -> float:
    if not name.endswith(":mean"):
        return math.fsum(values)
    weighted = math.fsum(value * count for value, count in zip(values, num_datums, strict=True))
    return weighted / sum(num_datums)


def _trees(sequences: Sequence[Ints], min_saved: int | None) -> list[_Tree]:
    order = order_by_prefix(sequences, min_saved)
    starts = [place for place, shared in enumerate(order.shared) if not shared]
    trees: list[_Tree] = []
    for start, stop in pairwise([*starts, len(order.numbers)]):
        members = order.numbers[start:stop]
        size = sum(len(sequences[number]) for number in members) - sum(order.shared[start:stop])
        trees.append(_Tree(members, size))
    return trees
