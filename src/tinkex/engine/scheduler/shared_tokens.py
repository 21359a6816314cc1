"""The tokens that an operation need not compute, because another one of its run in the same turn computes them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tinkex.engine.operation import Kind, Operation
from tinkex.engine.trainer.prefixes import count_distinct

Sequences = list[npt.NDArray[np.int64]]


class SharedTokens:
    """Counts the tokens of one turn that its operations share; only those whose datums are in memory are known.

    >>> shared = SharedTokens()
    >>> shared.saved_by(Operation("a", "ada", "base", "run", 1, Kind.FORWARD, 10))
    0
    """

    def __init__(self) -> None:
        self._members: dict[tuple[str, Kind], Sequences] = {}
        self._counts: dict[tuple[str, Kind], int] = {}

    def saved_by(self, operation: Operation) -> int:
        """How many tokens an operation would share with those that were added."""
        members = self._members.get(_key(operation))
        if members is None or operation.job is None:
            return 0
        together = count_distinct([*members, *_sequences(operation)])
        return max(0, self._counts[_key(operation)] + operation.tokens_computed - together)

    def add(self, operation: Operation) -> None:
        """Add an operation to the turn."""
        if operation.job is not None:
            key = _key(operation)
            members = self._members.setdefault(key, [])
            members += _sequences(operation)
            self._counts[key] = count_distinct(members)


def _key(operation: Operation) -> tuple[str, Kind]:
    """Passes with gradients share nothing with passes without."""
    return operation.run_id, operation.kind


def _sequences(operation: Operation) -> Sequences:
    assert operation.job is not None
    return [example.tokens_N for example in operation.job.examples]
