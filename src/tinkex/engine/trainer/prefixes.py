"""Shared prefixes: sequences that begin alike as a forest, in which each common prefix is one node.

Needs no weights and no torch. A pass computes the tokens of every node once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["MIN_SAVED", "PrefixOrder", "common_length", "count_distinct", "order_by_prefix", "prefix_key"]

MIN_SAVED = 8
"""Tokens that a node must save: the calls of attention that it adds take about as long as a few tokens."""

Ints = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True)
class PrefixOrder:
    """Sequences in the order of a depth-first walk through their forest."""

    numbers: list[int]
    """The numbers of the sequences."""
    shared: list[int]
    """How many tokens each shares with the one before it; no earlier one shares more with it."""


@dataclass(eq=False)
class _Branch:
    """All sequences with one prefix of ``depth`` tokens: those that end there, and those that go on."""

    depth: int
    ending: list[int] = field(default_factory=list)
    children: list[_Branch] = field(default_factory=list)
    first: int = 0
    """The lowest number of all its sequences."""


def order_by_prefix(sequences: Sequence[Ints], min_saved: int | None = MIN_SAVED) -> PrefixOrder:
    """The order in which sequences with common prefixes are neighbours, and what each shares with the one before.

    Prefixes that save fewer than ``min_saved`` tokens are not shared, with None no prefix is. Beside each other, the
    shorter ones come first, and of equal ones the first: without common prefixes the order is that of the lengths.

    Example:
        >>> prompt = [1, 2, 3]
        >>> order = order_by_prefix([np.array([*prompt, 4]), np.array([7, 8]), np.array([*prompt, 5, 6])], min_saved=1)
        >>> order.numbers, order.shared
        ([1, 0, 2], [0, 0, 3])
    """
    if min_saved is None:
        numbers = sorted(range(len(sequences)), key=lambda number: len(sequences[number]))
        return PrefixOrder(numbers, [0] * len(numbers))
    return _walk(_dissolve(_build(sequences), max(min_saved, 1)))


def count_distinct(sequences: Sequence[Ints], min_saved: int | None = MIN_SAVED) -> int:
    """How many tokens a pass over these sequences computes.

    Example:
        >>> count_distinct([np.arange(100), np.arange(120)])
        120
    """
    return sum(map(len, sequences)) - sum(order_by_prefix(sequences, min_saved).shared)


def prefix_key(tokens_N: Ints) -> bytes:
    """The tokens as bytes that compare token by token; a prefix comes before what continues it.

    Example:
        >>> prefix_key(np.array([1, 2])) < prefix_key(np.array([1, 2, 0])) < prefix_key(np.array([1, 256]))
        True
    """
    return tokens_N.astype(">u4").tobytes()


def _build(sequences: Sequence[Ints]) -> _Branch:
    """The forest as a trie with one branch for every place where sequences end or part."""
    keys = [prefix_key(tokens_N) for tokens_N in sequences]
    root = _Branch(0)
    path = [root]
    before: Ints | None = None
    for number in sorted(range(len(sequences)), key=keys.__getitem__):
        tokens_N = sequences[number]
        common = common_length(before, tokens_N) if before is not None else 0
        left: _Branch | None = None
        while path[-1].depth > common:
            left = path.pop()
        if path[-1].depth < common:
            assert left is not None
            path[-1].children[-1] = branch = _Branch(common, children=[left])
            path.append(branch)
        if len(tokens_N) == common:
            path[-1].ending.append(number)
        else:
            leaf = _Branch(len(tokens_N), [number])
            path[-1].children.append(leaf)
            path.append(leaf)
        before = tokens_N
    return root


def common_length(one: Tokens, other: Tokens) -> int:
    """How many tokens two sequences have in common at their beginning."""
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if different.size else length


def _dissolve(root: _Branch, min_saved: int) -> _Branch:
    """Removes the branches that save too little: what is below them has those tokens for itself."""
    waiting = [root]
    while waiting:
        parent = waiting.pop()
        kept: list[_Branch] = []
        candidates = list(parent.children)
        while candidates:
            branch = candidates.pop()
            num_ways = len(branch.ending) + len(branch.children)
            if num_ways > 1 and (branch.depth - parent.depth) * (num_ways - 1) < min_saved:
                candidates += branch.children
                kept += [_Branch(branch.depth, [number]) for number in branch.ending]
            else:
                kept.append(branch)
        parent.children = kept
        waiting += kept
    return root


def _walk(root: _Branch) -> PrefixOrder:
    branches = [root]
    for branch in branches:  # grows
        branches += branch.children
    for branch in reversed(branches):
        branch.first = min([*branch.ending, *(child.first for child in branch.children)], default=0)
        # Leaves of equal length are computed in one call of attention, so they are neighbours.
        depth = branch.depth
        branch.children.sort(key=lambda child: (bool(child.children), child.depth - depth, child.first))
    order = PrefixOrder([], [])
    waiting = [(root, 0)]
    common = 0
    while waiting:
        branch, depth_above = waiting.pop()
        common = min(common, depth_above)
        for number in sorted(branch.ending):
            order.numbers.append(number)
            order.shared.append(common)
            common = branch.depth
        waiting += [(child, branch.depth) for child in reversed(branch.children)]
    return order
