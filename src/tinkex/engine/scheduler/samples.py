"""Samples that wait for a place in the decode batch. They are independent: no order but fairness."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

from tinkex.engine.scheduler.fairness import FairShare
from tinkex.engine.scheduler.work import Work

Request = TypeVar("Request")


class SampleQueue(Generic[Request]):
    """Waiting samples of one base model, first come first served per user, users by tokens served.

    >>> from tinkex.engine.scheduler.work import Kind
    >>> def sample(name, tenant): return Work(name, tenant, "base", "sampler", 0, Kind.SAMPLE, 10, None)
    >>> queue = SampleQueue()
    >>> for name, tenant in [("a1", "ada"), ("a2", "ada"), ("b1", "bob")]:
    ...     queue.put(sample(name, tenant))
    >>> [queue.take().request_id for _ in range(3)]
    ['a1', 'b1', 'a2']
    """

    def __init__(self) -> None:
        self._lines: dict[str, OrderedDict[str, Work[Request]]] = {}
        self._turns = FairShare[str]()

    def __len__(self) -> int:
        return sum(len(line) for line in self._lines.values())

    def __contains__(self, request_id: str) -> bool:
        return any(request_id in line for line in self._lines.values())

    def put(self, work: Work[Request]) -> None:
        """Add a sample at the end of its user's line."""
        self._lines.setdefault(work.tenant, OrderedDict())[work.request_id] = work

    def take(self) -> Work[Request] | None:
        """The sample whose turn it is, or None."""
        if not self._lines:
            return None
        self._turns.waiting(self._lines.keys())
        tenant = self._turns.pick(self._lines)
        _, work = self._lines[tenant].popitem(last=False)
        self._drop_empty(tenant)
        self._turns.charge(tenant, max(work.num_tokens, 1))
        return work

    def cancel(self, request_id: str) -> Work[Request] | None:
        """Remove a sample that still waits; None if it does not."""
        for tenant, line in self._lines.items():
            if request_id in line:
                work = line.pop(request_id)
                self._drop_empty(tenant)
                return work
        return None

    def _drop_empty(self, tenant: str) -> None:
        if not self._lines[tenant]:
            del self._lines[tenant]
