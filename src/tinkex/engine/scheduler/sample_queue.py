"""Samples that wait for a place in the decode batch. They are independent: no order but fairness."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import islice

from tinkex.engine.operation import Operation
from tinkex.engine.scheduler.fairness import FairShare

MAX_EXAMINED = 256
"""How many samples of a user are looked at to find one that a sampler accepts."""


class SampleQueue:
    """Waiting samples of one base model, first come first served per user, users by tokens served.

    >>> from tinkex.engine.operation import Kind
    >>> def sample(name, owner): return Operation(name, owner, "base", "sampler", 0, Kind.SAMPLE, 10)
    >>> queue = SampleQueue()
    >>> for name, owner in [("a1", "ada"), ("a2", "ada"), ("b1", "bob")]:
    ...     queue.put(sample(name, owner))
    >>> [queue.take().request_id for _ in range(3)]
    ['a1', 'b1', 'a2']
    """

    def __init__(self) -> None:
        self._lines: dict[str, OrderedDict[str, Operation]] = {}
        self._retried: OrderedDict[str, Operation] = OrderedDict()
        self._shares = FairShare[str]()

    def __len__(self) -> int:
        return len(self._retried) + sum(len(line) for line in self._lines.values())

    def put(self, operation: Operation) -> None:
        """Add a sample at the end of its user's line."""
        self._lines.setdefault(operation.owner, OrderedDict())[operation.request_id] = operation

    def put_back(self, operation: Operation) -> None:
        """Add a sample that was interrupted: it is the next to be taken."""
        self._retried[operation.request_id] = operation
        self._retried.move_to_end(operation.request_id, last=False)

    @property
    def retried(self) -> Operation | None:
        """The interrupted sample that is taken next, or None."""
        return next(iter(self._retried.values()), None)

    def take(self, accepts: Callable[[Operation], bool] | None = None) -> Operation | None:
        """The sample whose turn it is, of those that ``accepts`` allows, or None. Interrupted ones come first, and are always allowed."""
        if self._retried:
            return self._retried.popitem(last=False)[1]
        found = {owner: first for owner in self._lines if (first := self._first(owner, accepts)) is not None}
        if not found:
            return None
        self._shares.waiting(self._lines.keys())
        owner = self._shares.pick(found)
        operation = found[owner]
        del self._lines[owner][operation.request_id]
        self._drop_empty(owner)
        self._shares.charge(owner, max(operation.num_tokens, 1))
        return operation

    def _first(self, owner: str, accepts: Callable[[Operation], bool] | None) -> Operation | None:
        line = self._lines[owner].values()
        if accepts is None:
            return next(iter(line), None)
        return next(filter(accepts, islice(line, MAX_EXAMINED)), None)

    def remove(self, operation: Operation) -> None:
        """Remove a waiting sample."""
        if self._retried.pop(operation.request_id, None) is None:
            del self._lines[operation.owner][operation.request_id]
            self._drop_empty(operation.owner)

    def _drop_empty(self, owner: str) -> None:
        if not self._lines[owner]:
            del self._lines[owner]
