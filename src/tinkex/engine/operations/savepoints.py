"""Savepoints of runs: the exact state, written every so often, so that a replay is short.

A savepoint is taken between two turns (a copy in memory) and written beside the turns that follow. Runs that shared
a pass since their last savepoints are saved together, so that a turn is covered for all of its members or for none.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinkex.engine.backend.seam import Backend, WorkerDied
from tinkex.engine.config import EngineConfig
from tinkex.engine.operations.health import Health
from tinkex.engine.operations.recording import Effect
from tinkex.engine.store import RunStatus, SavepointRow, Store

if TYPE_CHECKING:
    from tinkex.engine.operations.execution import LiveRun

logger = logging.getLogger("tinkex.engine")

SUBJECT = "savepoints"
RETRY_S = 30.0
STATES_IN_FLIGHT = 2
WRITE_ERRORS = (OSError, sqlite3.Error)


@dataclass(frozen=True)
class Capture:
    """The state of a run at one moment, held where it was computed under a number."""

    run_id: str
    next_seq: int
    number: int


class SavepointKeeper:
    """Decides when savepoints are due, and makes them. Belongs to the engine thread."""

    def __init__(
        self,
        config: EngineConfig,
        store: Store,
        backend: Backend,
        live: Mapping[str, LiveRun],
        health: Health,
    ) -> None:
        self._config = config
        self._store = store
        self._backend = backend
        self._live = live
        self._health = health
        self._seconds: Counter[str] = Counter()
        self._operations: Counter[str] = Counter()
        self._not_before = 0.0
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="tinkex-savepoint")
        # A copy of a state is as large as the state: few of them at a time.
        self._room = threading.Semaphore(STATES_IN_FLIGHT)
        self._under_way: tuple[Future[bool], Counter[str], Counter[str]] | None = None

    def worked(self, run_ids: Iterable[str], seconds: float) -> None:
        """Note work that a replay would have to do again."""
        for run_id in run_ids:
            # Fractions count: Counter is typed for whole numbers, and works with any.
            self._seconds[run_id] += seconds  # type: ignore[assignment]
            self._operations[run_id] += 1

    def save_if_due(self, turn: int) -> None:
        """Start to write savepoints if some run has done enough since its last; ``turn`` is the last one recorded."""
        self._settle()
        if self._under_way is not None or time.monotonic() < self._not_before:
            return
        due = [
            run_id
            for run_id in self._seconds
            if self._seconds[run_id] >= self._config.savepoint_after_s
            or self._operations[run_id] >= self._config.savepoint_after_operations
        ]
        if due:
            self._start(due, turn)

    def save_now(self, run_id: str, turn: int) -> Effect | None:
        """Write a savepoint of a run at once; it counts from the commit that the returned effect is part of.

        None if it cannot be written: then the journal goes on from the savepoint before.
        """
        self._settle(wait=True)
        members = self._store.journal.entangled([run_id])
        if not self._all_here(members):
            return None
        rows: list[SavepointRow] = []
        try:
            rows.extend(self._write(self._capture(m), turn) for m in sorted(members & self._live.keys()))
        except (*WRITE_ERRORS, WorkerDied) as error:
            self._discard(rows)
            if isinstance(error, WorkerDied):
                raise
            self._failed(error)
            return None
        self._forget_work(members)
        return lambda: self._commit(rows, members, turn)

    def worker_died(self) -> None:
        """Give up the savepoints under way; what the runs have done since theirs is done again, and counted then."""
        self._settle(wait=True)
        self._not_before = 0.0
        self._seconds.clear()
        self._operations.clear()

    def flush(self) -> None:
        """Wait for the savepoints under way."""
        self._settle(wait=True)

    def close(self) -> None:
        """Finish the savepoints under way."""
        self._writer.shutdown(wait=True)

    # ---- making them

    def _start(self, due: Sequence[str], turn: int) -> None:
        members = self._store.journal.entangled(due)
        if not self._all_here(members):
            return
        written: list[Future[SavepointRow]] = []
        for run_id in sorted(members & self._live.keys()):
            self._room.acquire()
            try:
                taken = self._capture(run_id)
            except WorkerDied:
                self._room.release()
                self._discard([each.result() for each in written if each.exception() is None])
                raise
            written.append(self._writer.submit(self._write_and_make_room, taken, turn))
        seconds = Counter({m: self._seconds[m] for m in members})
        operations = Counter({m: self._operations[m] for m in members})
        self._under_way = (self._writer.submit(self._finish, written, members, turn), seconds, operations)

    def _capture(self, run_id: str) -> Capture:
        return Capture(run_id, self._live[run_id].next_seq, self._backend.capture(run_id))

    def _write_and_make_room(self, state: Capture, turn: int) -> SavepointRow:
        try:
            return self._write(state, turn)
        finally:
            self._room.release()

    def _write(self, state: Capture, turn: int) -> SavepointRow:
        with self._store.directories.savepoint() as writing:
            digest = self._backend.write_savepoint(state.number, writing.temporary)
        return SavepointRow(state.run_id, turn, state.next_seq, writing.final, writing.size_bytes, digest)

    def _finish(self, written: Sequence[Future[SavepointRow]], members: Iterable[str], turn: int) -> bool:
        """On the writer's thread: make the written savepoints count, all of them or none."""
        try:
            remove_old = self._commit([future.result() for future in written], members, turn)
        except (*WRITE_ERRORS, WorkerDied) as error:
            if not isinstance(error, WorkerDied):
                self._failed(error)
            self._discard([each.result() for each in written if each.exception() is None])
            return False
        remove_old()
        self._health.fine(SUBJECT)
        return True

    def _discard(self, rows: Iterable[SavepointRow]) -> None:
        """Remove the files of savepoints that do not count."""
        for row in rows:
            self._store.directories.remove_savepoint(row.file)

    def _commit(self, rows: Sequence[SavepointRow], members: Iterable[str], turn: int) -> Removal:
        """Replace savepoints and prune what the new ones cover, also of runs that are over by now."""
        saved = {row.run_id for row in rows}
        with self._store.database.transaction():
            old = [self._store.savepoints.put(row) for row in rows]
            for row in rows:
                self._store.journal.prune(row.run_id, through_turn=turn, next_seq=row.next_seq)
            for run_id in set(members) - saved:
                self._store.journal.forget(run_id)
                old.append(self._store.savepoints.delete(run_id))
        return Removal(self._store, [file for file in old if file is not None])

    def _settle(self, *, wait: bool = False) -> None:
        """Take note of savepoints that have been finished."""
        if self._under_way is None or not (wait or self._under_way[0].done()):
            return
        finished, seconds, operations = self._under_way
        self._under_way = None
        if finished.result():
            self._seconds -= seconds
            self._operations -= operations
        else:
            self._not_before = time.monotonic() + RETRY_S

    def _all_here(self, run_ids: Iterable[str]) -> bool:
        """Whether these runs are in memory or over; one that could not be brought back still needs its journal."""
        for run_id in run_ids:
            row = self._store.runs.get(run_id)
            if run_id not in self._live and row is not None and row.status is RunStatus.LIVE:
                self._forget_work([run_id])
                return False
        return True

    def _forget_work(self, run_ids: Iterable[str]) -> None:
        for run_id in run_ids:
            self._seconds.pop(run_id, None)
            self._operations.pop(run_id, None)

    def _failed(self, error: Exception) -> None:
        logger.warning("a savepoint could not be written: %s", error)
        self._health.trouble(SUBJECT, f"savepoints cannot be written ({error})")


@dataclass(frozen=True)
class Removal:
    """Removes the files that savepoints have replaced."""

    store: Store
    files: Sequence[str]

    def __call__(self) -> None:
        """Remove them."""
        for file in self.files:
            self.store.directories.remove_savepoint(file)


def forget_ended(store: Store, live: Iterable[str]) -> None:
    """Drop the journal and savepoints of runs that are over, unless a live run shared a pass with them."""
    alive = set(live)
    known = store.journal.runs() | {row.run_id for row in store.savepoints.all()}
    for run_id in known - alive:
        if not store.journal.entangled([run_id]) & alive:
            store.journal.forget(run_id)
            file = store.savepoints.delete(run_id)
            if file is not None:
                store.directories.remove_savepoint(file)
