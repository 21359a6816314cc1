"""Samples that wait for a place in the decode batch. They are independent: no order but fairness."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import count, islice

from tinkex.engine.operation import Operation
from tinkex.engine.scheduler.fairness import FairShare

MAX_EXAMINED = 256
"""How many samples of a user are looked at to find one that a sampler accepts."""
MIN_ENTRIES = 64
"""So many entries are kept in the order of users without a look at which are obsolete."""


class SampleQueue:
    """Waiting samples of one base model, first come first served per user, users by tokens served.

    With several samplers each has those that are assigned to it, so that taking one does not depend on how many there are.

    >>> from tinkex.engine.operation import Kind
    >>> def sample(name, owner): return Operation(name, owner, "base", "sampler", 0, Kind.SAMPLE, 10)
    >>> queue = SampleQueue()
    >>> for name, owner in [("a1", "ada"), ("a2", "ada"), ("b1", "bob")]:
    ...     queue.put(sample(name, owner))
    >>> [queue.take().request_id for _ in range(3)]
    ['a1', 'b1', 'a2']
    """

    def __init__(self) -> None:
        self._shares = FairShare[str]()
        self._arrivals = count()
        self._waiting = _Lines(self._shares)
        self._unassigned: OrderedDict[str, Operation] = OrderedDict()
        self._assigned: dict[str, _Lines] = {}
        self._lanes: dict[str, str] = {}
        """The sampler of every sample that is assigned to one."""
        self._retried: OrderedDict[str, Operation] = OrderedDict()

    def __len__(self) -> int:
        return len(self._retried) + len(self._waiting)

    def put(self, operation: Operation) -> None:
        """Add a sample at the end of its user's line."""
        self._shares.arrive(operation.owner)
        self._waiting.put(operation, next(self._arrivals))
        self._unassigned[operation.request_id] = operation

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
        return self._serve(self._waiting.first(accepts))

    def take_assigned(self, lane: str, assign: Callable[[Operation], str | None]) -> Operation | None:
        """The sample whose turn it is on a sampler, or None; new ones are assigned before. Interrupted ones come first."""
        if self._retried:
            return self._retried.popitem(last=False)[1]
        for operation in list(self._unassigned.values()):
            found = assign(operation)
            if found is not None:
                del self._unassigned[operation.request_id]
                self._lanes[operation.request_id] = found
                lines = self._assigned.setdefault(found, _Lines(self._shares))
                lines.put(operation, self._waiting.arrival(operation.owner))
        own = self._assigned.get(lane)
        return self._serve(own.first() if own is not None else None)

    def assign_again(self) -> None:
        """Forget which samplers the samples are assigned to: others run now."""
        self._lanes.clear()
        self._assigned.clear()
        self._unassigned = OrderedDict((each.request_id, each) for each in self._waiting)

    def remove(self, operation: Operation) -> None:
        """Remove a waiting sample."""
        if self._retried.pop(operation.request_id, None) is None:
            self._remove_waiting(operation)

    def _serve(self, operation: Operation | None) -> Operation | None:
        if operation is not None:
            owner = self._shares.pick([operation.owner])
            self._shares.charge(owner, max(operation.num_tokens, 1))
            self._remove_waiting(operation)
        return operation

    def _remove_waiting(self, operation: Operation) -> None:
        self._unassigned.pop(operation.request_id, None)
        lane = self._lanes.pop(operation.request_id, None)
        if lane is not None:
            self._assigned[lane].remove(operation)
        self._waiting.remove(operation)
        if not self._waiting.has(operation.owner):
            self._shares.leave(operation.owner)


class _Lines:
    """A line of samples for each user; the users are in the order of what they were served."""

    def __init__(self, shares: FairShare[str]) -> None:
        self._shares = shares
        self._lines: dict[str, OrderedDict[str, Operation]] = {}
        self._order: list[tuple[float, int, str]] = []
        """Users by their accounts; entries that are not in ``_entries`` are obsolete, and so are those of another account."""
        self._entries: dict[str, tuple[float, int, str]] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Operation]:
        return (operation for line in self._lines.values() for operation in line.values())

    def has(self, owner: str) -> bool:
        """Whether a user has samples here."""
        return owner in self._lines

    def arrival(self, owner: str) -> int:
        """The number of a user who has samples here; it decides between users who were served the same."""
        return self._entries[owner][1]

    def put(self, operation: Operation, arrival: int) -> None:
        """Add a sample at the end of its user's line; a user who has none here gets the number ``arrival``."""
        if operation.owner not in self._lines:
            self._lines[operation.owner] = OrderedDict()
            self._enter(operation.owner, arrival)
        self._lines[operation.owner][operation.request_id] = operation
        self._size += 1

    def remove(self, operation: Operation) -> None:
        """Remove a sample."""
        owner = operation.owner
        del self._lines[owner][operation.request_id]
        self._size -= 1
        if not self._lines[owner]:
            del self._lines[owner], self._entries[owner]
            if len(self._order) > 2 * len(self._entries) + MIN_ENTRIES:
                self._order = sorted(self._entries.values())

    def first(self, accepts: Callable[[Operation], bool] | None = None) -> Operation | None:
        """The first sample that is accepted, of the user served least of those that have one."""
        examined: list[tuple[float, int, str]] = []
        found = None
        while found is None and self._order:
            entry = heapq.heappop(self._order)
            account, arrival, owner = entry
            if self._entries.get(owner) is not entry:
                continue
            if account != self._shares.account(owner):
                self._enter(owner, arrival)
                continue
            examined.append(entry)
            line = self._lines[owner].values()
            found = next(filter(accepts, islice(line, MAX_EXAMINED)), None) if accepts else next(iter(line))
        for entry in examined:
            heapq.heappush(self._order, entry)
        return found

    def _enter(self, owner: str, arrival: int) -> None:
        entry = self._shares.account(owner), arrival, owner
        self._entries[owner] = entry
        heapq.heappush(self._order, entry)
