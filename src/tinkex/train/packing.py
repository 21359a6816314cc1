"""How the sequences of a pass are packed: how many of their tokens are different, shared and computed.

Nothing is padded. Tokens that sequences have in common at their beginning are the same numbers for all of them, and a tinkex
engine computes them once per pass, if that saves at least ``MIN_SAVED`` tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

__all__ = [
    "FIRST_PLACEHOLDER",
    "MIN_SAVED",
    "Packing",
    "computed_tokens",
    "describe",
    "from_metrics",
    "pack",
    "placeholders",
]

MIN_SAVED = 8
"""Tokens that a shared prefix must save before an engine computes it once."""
FIRST_PLACEHOLDER = 2**31
"""Above the tokens of every vocabulary."""


@dataclass(frozen=True)
class Packing:
    """The packing of one pass."""

    num_sequences: int
    num_tokens: int
    """All tokens that are sent."""
    different_tokens: int
    """Those that no other sequence of the pass has at the same place after the same tokens; the rest is shared."""
    computed_tokens: int
    """Those that a tinkex engine computes, which shares prefixes only where it saves time."""

    def as_json(self) -> dict[str, int]:
        """Returns the numbers, for a line of ``metrics.jsonl``."""
        return asdict(self)


def pack(sequences: Sequence[Sequence[int]]) -> Packing:
    """Counts the tokens of a pass.

    >>> prompt = list(range(10))
    >>> pack([[*prompt, 100], [*prompt, 200, 201], [300]])
    Packing(num_sequences=3, num_tokens=24, different_tokens=14, computed_tokens=14)
    """
    ordered = sorted(map(list, sequences))
    return Packing(
        len(ordered), sum(map(len, ordered)), computed_tokens(ordered, 1), computed_tokens(ordered, MIN_SAVED)
    )


def computed_tokens(ordered: Sequence[Sequence[int]], min_saved: int) -> int:
    """Returns the number of tokens of sorted sequences, those of a common prefix once if that saves ``min_saved``.

    >>> computed_tokens([[1, 2, 3], [1, 2, 4]], 1), computed_tokens([[1, 2, 3], [1, 2, 4]], 8)
    (4, 6)
    """
    common = [0, *(_common_length(one, other) for one, other in pairwise(ordered))]
    total = 0
    waiting = [(0, len(ordered), 0)] if ordered else []
    while waiting:  # sequences first…stop share their first ``depth`` tokens, which are counted already
        first, stop, depth = waiting.pop()
        if stop - first == 1:
            total += len(ordered[first]) - depth
            continue
        branch = min(common[first + 1 : stop])
        starts = [first, *(place for place in range(first + 1, stop) if common[place] == branch), stop]
        if (branch - depth) * (len(starts) - 2) >= min_saved:
            total += branch - depth
            depth = branch
        waiting += [(one, other, depth) for one, other in pairwise(starts)]
    return total


def placeholders(first: int, number: int) -> range:
    """Returns tokens that are not known yet and differ from all others.

    >>> len({*placeholders(0, 3), *placeholders(3, 3)})
    6
    """
    return range(FIRST_PLACEHOLDER + first, FIRST_PLACEHOLDER + first + number)


def describe(packings: Sequence[Packing]) -> str:
    """Returns the packing of passes on one line.

    >>> describe([Packing(8, 800, 450, 470), Packing(6, 600, 600, 600)])
    '2 passes of 6 to 8 sequences, 600 to 800 tokens; of 1,400 tokens 1,050 are different, 350 shared; 1,070 computed'
    """
    if not packings:
        return "no passes: nothing was trained on"
    tokens, different, computed = (
        sum(getattr(one, name) for one in packings)
        for name in ("num_tokens", "different_tokens", "computed_tokens")
    )
    passes = "1 pass" if len(packings) == 1 else f"{len(packings):,} passes"
    sequences = _count([one.num_sequences for one in packings], "sequence")
    sizes = _count([one.num_tokens for one in packings], "token")
    return (
        f"{passes} of {sequences}, {sizes}; of {tokens:,} tokens {different:,} are different, "
        f"{tokens - different:,} shared; {computed:,} computed"
    )


def from_metrics(metrics: Sequence[Mapping[str, Any]]) -> list[Packing]:
    """Returns the packings of all passes in the lines of ``metrics.jsonl``."""
    return [Packing(**one) for line in metrics for one in line.get("packing", ())]


def _count(numbers: Sequence[int], noun: str) -> str:
    """Returns the range of numbers of something.

    >>> _count([1, 1], "token"), _count([1, 2], "token")
    ('1 token', '1 to 2 tokens')
    """
    low, high = min(numbers), max(numbers)
    shown = f"{low:,}" if low == high else f"{low:,} to {high:,}"
    return f"{shown} {noun}{'' if high == 1 else 's'}"


def _common_length(one: Sequence[int], other: Sequence[int]) -> int:
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return min(len(one), len(other))
