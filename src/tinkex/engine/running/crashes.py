"""Crashes of the worker by operation: an operation runs again, and one that crashes the worker every time is quarantined.

A worker that is killed from outside says little about what it computed; one that crashes, or runs out of memory, says much.
The first time, everything runs again as it was, so that the numbers are the same. An operation that was running in several
crashes runs alone from then on, so that the cause among those that ran together can be determined.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tinkex.engine.lanes.interface import WorkerLost
from tinkex.engine.scheduler import Turn
from tinkex.errors import EngineFailure

CRASH_WEIGHT = 3
KILL_WEIGHT = 1
RUN_ALONE_FROM = 6
QUARANTINE_FROM = 9
"""Three crashes, or nine kills from outside, all during one operation without a result in between."""


class CrashTracker:
    """Counts crashes by operation and by run. Only called on the engine thread.

    >>> crashes = CrashTracker()
    >>> for _ in range(3):
    ...     crashes.record_crash(["req-1"], WorkerLost("it was terminated by SIGSEGV", own_fault=True))
    >>> crashes.is_quarantined("req-1"), crashes.is_quarantined("req-2")
    (True, False)
    """

    def __init__(self) -> None:
        self._weights: dict[str, int] = {}

    def record_crash(self, names: Iterable[str], lost: WorkerLost) -> None:
        """Count a crash against the operations or runs that were running."""
        weight = CRASH_WEIGHT if lost.own_fault else KILL_WEIGHT
        for name in names:
            self._weights[name] = self._weights.get(name, 0) + weight

    def turns_to_retry(self, turn: Turn) -> Sequence[Turn]:
        """The turns in which operations of an interrupted turn run again; none if its one operation is quarantined."""
        ids = [operation.request_id for operation in turn.operations]
        if len(ids) == 1:
            return [] if self.is_quarantined(ids[0]) else [turn]
        if any(self.runs_alone(request_id) for request_id in ids):
            return [Turn((operation,)) for operation in turn.operations]
        return [turn]

    def clear(self, names: Iterable[str]) -> None:
        """Forget operations that have an outcome, and runs that are restored."""
        for name in names:
            self._weights.pop(name, None)

    def runs_alone(self, request_id: str) -> bool:
        """Whether an operation has to run alone."""
        return self._weights.get(request_id, 0) >= RUN_ALONE_FROM

    def is_quarantined(self, name: str) -> bool:
        """Whether an operation that ran alone must not run again, or a run must not be replayed again."""
        return self._weights.get(name, 0) >= QUARANTINE_FROM


def quarantined(lost: WorkerLost) -> EngineFailure:
    """The error of an operation that crashed the worker every time."""
    return EngineFailure(
        f"the worker was lost every time this operation ran, the last time because {lost.reason}; it was quarantined, and "
        "changed nothing. If memory ran out, send less in one request, or run the engine with more memory."
    )
