"""The tokens that an operation need not compute, because another one of its run in the same turn computes them."""

from __future__ import annotations

from bisect import bisect, insort
from typing import TypeAlias

import numpy as np

from tinkex.engine.operation import Kind, Operation
from tinkex.engine.trainer.prefixes import MIN_SAVED, common_length, prefix_key

Group: TypeAlias = tuple[str, Kind]
"""A run, and whether its passes have gradients: those with and without share nothing."""


class SharedTokens:
    """Counts the tokens of one turn that its operations share; only those whose datums are in memory are known.

    An operation takes a search for each of its datums, however many there are in the turn. A prefix of fewer than ``MIN_SAVED``
    tokens counts as none, although a pass shares one that saves as many in all.

    >>> shared = SharedTokens()
    >>> shared.saved_by(Operation("a", "ada", "base", "run", 1, Kind.FORWARD, 10))
    0
    """

    def __init__(self) -> None:
        self._keys: dict[Group, list[bytes]] = {}
        """The keys of all datums, sorted: neighbours share the longest prefixes."""

    def saved_by(self, operation: Operation) -> int:
        """How many tokens an operation would share with those that were added."""
        members = self._keys.get((operation.run_id, operation.kind))
        if members is None:
            return 0
        shared, before = 0, b""
        for key in sorted(_keys(operation)):
            place = bisect(members, key)
            longest = max(_common(key, other) for other in (before, *members[max(place - 1, 0) : place + 1]))
            shared += longest if longest >= MIN_SAVED else 0
            before = key
        return max(0, shared - (operation.num_tokens - operation.tokens_computed))

    def add(self, operation: Operation) -> None:
        """Add an operation to the turn."""
        members = self._keys.setdefault((operation.run_id, operation.kind), [])
        for key in _keys(operation):
            insort(members, key)


def _keys(operation: Operation) -> list[bytes]:
    examples = operation.job.examples if operation.job is not None else ()
    return [prefix_key(example.tokens_N) for example in examples]


def _common(one: bytes, other: bytes) -> int:
    return common_length(np.frombuffer(one, ">u4"), np.frombuffer(other, ">u4"))
