"""Crashes of the worker: what crashes it every time is quarantined, and the user who crashes it waits.

A worker that is killed from outside says little about what it computed; one that crashes, or runs out of memory, says much.
The first time, everything runs again, those without a custom loss as it was, so that the numbers are the same. An operation
that was running in several crashes runs alone from then on, so that the cause among those that ran together can be determined.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet

from tinkex.engine.lanes.interface import WorkerLost
from tinkex.engine.operation import Operation
from tinkex.engine.scheduler import CrashBackoff, Turn
from tinkex.engine.scheduler.crash_backoff import FORGET_AFTER_S
from tinkex.engine.store import Crashes, CrashKind, CrashRow
from tinkex.engine.store.crashes import MAX_ROWS
from tinkex.errors import EngineFailure, InvalidInput, OverQuota

CRASH_WEIGHT = 3
KILL_WEIGHT = 1
RUN_ALONE_FROM = 6
QUARANTINE_FROM = 9
"""Three crashes, or nine kills from outside, all during one operation without a result in between."""
LOSS_QUARANTINE_FROM = 6
"""Two crashes for an operation with a custom loss, which is the likely cause."""
LOSS_QUARANTINE_S = 7 * 24 * 3600.0
"""How long a loss is quarantined: the cause may be fixed by then."""

logger = logging.getLogger("tinkex.engine")


class CrashTracker:
    """Counts crashes by operation, by run, by custom loss and by user; what ``records`` has of the last two survives a restart.

    Operations and runs are only counted on the engine thread. What concerns losses and users is safe on any thread.

    >>> crashes = CrashTracker()
    >>> for _ in range(3):
    ...     crashes.record_crash(["req-1"], WorkerLost("it was terminated by SIGSEGV", own_fault=True))
    >>> crashes.is_quarantined("req-1"), crashes.is_quarantined("req-2")
    (True, False)
    """

    def __init__(
        self,
        users: CrashBackoff[str] | None = None,
        records: Crashes | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._weights: dict[str, int] = {}
        self._lock = threading.Lock()
        self._losses: OrderedDict[str, CrashRow] = OrderedDict()
        """Quarantined losses."""
        self._users = users or CrashBackoff[str]()
        self._records = records
        self._clock = clock
        now = clock()
        for row in records.all(now) if records is not None else ():
            if row.kind is CrashKind.LOSS:
                self._losses[row.name] = row
            else:
                self._users.restore(row.name, row.num_crashes, now - row.crashed_at)

    # ---- operations and runs

    def record_crash(self, names: Iterable[str], lost: WorkerLost) -> None:
        """Count a crash against the operations or runs that were running."""
        weight = CRASH_WEIGHT if lost.own_fault else KILL_WEIGHT
        for name in names:
            self._weights[name] = self._weights.get(name, 0) + weight

    def record_operations(self, operations: Sequence[Operation], lost: WorkerLost) -> bool:
        """Count a crash against operations that were running, and their user; returns whether that is one user.

        If operations of several users ran together, it is not known whose crashed the worker, and all run again.
        """
        self.record_crash([operation.request_id for operation in operations], lost)
        owners = {operation.owner for operation in operations}
        if not lost.own_fault or len(owners) != 1:
            return False
        (owner,) = owners
        with self._lock:
            self._users.record(owner)
            num_crashes = self._users.num_crashes(owner)
        self._remember(CrashKind.USER, owner, num_crashes, lost, FORGET_AFTER_S)
        return True

    def turns_to_retry(self, turn: Turn, lost: WorkerLost) -> Sequence[Turn]:
        """The turns in which operations of an interrupted turn run again; none if its one operation is quarantined.

        A crash that may be the fault of a custom loss is not repeated with the runs of others.
        """
        if len(turn) == 1:
            return [] if self.quarantine(turn[0], lost) else [turn]
        if any(self.runs_alone(operation.request_id) for operation in turn):
            return [(operation,) for operation in turn]
        suspects = {operation.run_id for operation in turn if operation.loss and lost.own_fault}
        if not suspects:
            return [turn]
        others = tuple(operation for operation in turn if operation.run_id not in suspects)
        alone = [(operation,) for operation in turn if operation.run_id in suspects]
        return [others, *alone] if others else alone

    def quarantine(self, operation: Operation, lost: WorkerLost) -> bool:
        """Whether an operation that ran alone must not run again; then neither does its custom loss."""
        limit = QUARANTINE_FROM if operation.loss is None else LOSS_QUARANTINE_FROM
        if self._weights.get(operation.request_id, 0) < limit:
            return False
        if operation.loss is not None and lost.own_fault:
            num_crashes = self._weights[operation.request_id] // CRASH_WEIGHT
            row = self._remember(CrashKind.LOSS, operation.loss, num_crashes, lost, LOSS_QUARANTINE_S)
            with self._lock:
                self._losses[operation.loss] = row
                while len(self._losses) > MAX_ROWS:
                    self._losses.popitem(last=False)
        return True

    def _remember(
        self, kind: CrashKind, name: str, num_crashes: int, lost: WorkerLost, seconds: float
    ) -> CrashRow:
        """Record crashes, so that a restart does not forget them."""
        now = self._clock()
        row = CrashRow(kind, name, num_crashes, lost.reason, now, now + seconds)
        if self._records is not None:
            try:
                self._records.record(row)
            except sqlite3.Error as error:
                logger.warning(
                    "a crash of the worker is forgotten at a restart, it cannot be recorded: %s", error
                )
        return row

    def clear(self, names: Iterable[str]) -> None:
        """Forget operations that have an outcome, and runs that are restored."""
        if self._weights:
            for name in names:
                self._weights.pop(name, None)

    def runs_alone(self, request_id: str) -> bool:
        """Whether an operation has to run alone."""
        return self._weights.get(request_id, 0) >= RUN_ALONE_FROM

    def is_quarantined(self, name: str) -> bool:
        """Whether a sample that ran alone must not run again, or a run must not be replayed again."""
        return self._weights.get(name, 0) >= QUARANTINE_FROM

    # ---- losses and users

    def check_loss(self, digest: str | None) -> None:
        """Raise ``InvalidInput`` for a custom loss that is quarantined."""
        with self._lock:
            row = self._losses.get(digest) if digest is not None else None
        if row is not None and self._clock() < row.expires_at:
            raise InvalidInput(
                f"this custom loss is quarantined: the worker was lost whenever it ran, the last time because {row.reason}. "
                "Nothing was executed; create a loss that computes something else."
            )

    def check_user(self, owner: str) -> None:
        """Raise ``OverQuota`` for a user who has to wait because of crashes."""
        with self._lock:
            wait_s, num_crashes = self._users.wait_s(owner), self._users.num_crashes(owner)
        if wait_s > 0:
            error = OverQuota(
                f"operations of yours have crashed the worker {num_crashes} times, so more are accepted only in {wait_s:.1f} s, "
                "and later after every further crash; find out which operation it is before you submit it again."
            )
            error.retry_after_s = wait_s
            raise error

    @property
    def delayed_users(self) -> AbstractSet[str]:
        """The users whose operations wait because of crashes."""
        with self._lock:
            return self._users.delayed

    @property
    def next_deadline(self) -> float | None:
        """When the next delay of a user ends; None if no user is delayed."""
        with self._lock:
            return self._users.next_deadline


def quarantined(lost: WorkerLost) -> EngineFailure:
    """The error of an operation that crashed the worker every time."""
    return EngineFailure(
        f"the worker was lost every time this operation ran, the last time because {lost.reason}; it was quarantined, and "
        "changed nothing. If memory ran out, send less in one request, or run the engine with more memory."
    )
