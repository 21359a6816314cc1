"""Savepoints of runs: the exact state, written every so often, so that a replay is short.

A savepoint is captured between two turns (a copy in memory) and written while the next turns run. Runs that shared
a pass since their last savepoints are saved together, so that a turn is covered for all of its members or for none.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from tinkex.engine.config import EngineConfig
from tinkex.engine.health import Health
from tinkex.engine.lanes.interface import Backend, WorkerLost
from tinkex.engine.lanes.lane import Lane
from tinkex.engine.running.training import LiveRun
from tinkex.engine.store import RunStatus, SavepointRow, Store
from tinkex.engine.store.changes import SavepointsWritten, apply

logger = logging.getLogger("tinkex.engine")

SUBJECT = "savepoints"
RETRY_S = 30.0
MAX_CAPTURES = 2
"""Captured states in memory: each is as large as the state of its run."""
WRITE_ERRORS = (OSError, sqlite3.Error)


@dataclass(frozen=True)
class _Writing:
    """Savepoints that are being written, and the work they cover."""

    finished: Future[bool]
    seconds: Counter[str]
    operations: Counter[str]


class SavepointWriter:
    """Decides when savepoints are due, and writes them.

    Called by jobs on the lane's thread, and by the loop while the lane is idle.
    """

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
        self._due: set[str] = set()
        self._not_before = 0.0
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="tinkex-savepoint")
        self._captures = threading.Semaphore(MAX_CAPTURES)
        self._writing: _Writing | None = None

    def record_work(self, run_ids: AbstractSet[str], seconds: float) -> None:
        """Count work that a replay would have to repeat."""
        for run_id in run_ids:
            # Fractions count: Counter is typed for whole numbers, and works with any.
            self._seconds[run_id] += seconds  # type: ignore[assignment]
            self._operations[run_id] += 1
        self._update_due(run_ids)

    def request(self, run_ids: Iterable[str]) -> None:
        """Make savepoints due of those runs that have done anything since their last ones, which prunes their journals."""
        self._due.update(run_id for run_id in run_ids if self._operations[run_id])

    @property
    def is_due(self) -> bool:
        """Whether some run has done enough since its last savepoint, and none are being written."""
        if self._writing is not None:
            self._collect()
        return self._writing is None and time.monotonic() >= self._not_before and bool(self._due)

    def write_due(self, turn: int) -> None:
        """Capture the runs that are due, and start to write them; ``turn`` is the last one committed."""
        run_ids = self._store.journal.runs_sharing_turns(self._due)
        if not self._is_complete(run_ids):
            self._not_before = time.monotonic() + RETRY_S
            return
        written: list[Future[SavepointRow]] = []
        for run_id in sorted(run_ids & self._live.keys()):
            self._captures.acquire()
            try:
                capture = self._backend.capture(run_id)
            except WorkerLost:
                self._captures.release()
                self._discard([each.result() for each in written if each.exception() is None])
                raise
            next_seq = self._live[run_id].next_seq
            written.append(self._executor.submit(self._write_and_release, capture, run_id, next_seq, turn))
        self._writing = _Writing(
            self._executor.submit(self._finish, written, run_ids, turn),
            Counter({run_id: self._seconds[run_id] for run_id in run_ids}),
            Counter({run_id: self._operations[run_id] for run_id in run_ids}),
        )

    def write_now(self, run_id: str, turn: int) -> SavepointsWritten | None:
        """Write a savepoint of a run; it is valid once the returned change is committed.

        None if it cannot be written: then a replay continues from the savepoint before.
        """
        self._collect(wait=True)
        run_ids = self._store.journal.runs_sharing_turns([run_id])
        if not self._is_complete(run_ids):
            return None
        rows: list[SavepointRow] = []
        try:
            rows.extend(
                self._write(self._backend.capture(each), each, self._live[each].next_seq, turn)
                for each in sorted(run_ids & self._live.keys())
            )
        except (*WRITE_ERRORS, WorkerLost) as error:
            self._discard(rows)
            if isinstance(error, WorkerLost):
                raise
            self._report_failure(error)
            return None
        self._forget_work(run_ids)
        return SavepointsWritten(rows, run_ids, turn)

    def save_now(self, run_id: str, turn: int) -> bool:
        """Write and commit a savepoint of a run, unless it has done nothing since its last one.

        Returns whether the run may leave memory: not if the disk failed. ``turn`` is the last one committed.
        """
        self._collect(wait=True)
        if not self._store.journal.turns([run_id]):
            self._forget_work([run_id])
            return True
        if not self._is_complete(self._store.journal.runs_sharing_turns([run_id])):
            self._forget_work([run_id])
            return True  # it is replayed together with a run that left memory when a turn failed
        written = self.write_now(run_id, turn)
        if written is None:
            return False
        try:
            self._commit(written)
        except sqlite3.Error as error:
            self._report_failure(error)
            self._discard(written.savepoints)
            return False
        return True

    def reset(self) -> None:
        """Give up what is being written: the worker was lost. What is replayed is counted again."""
        self._collect(wait=True)
        self._not_before = 0.0
        self._seconds.clear()
        self._operations.clear()
        self._due.clear()

    def flush(self, turn: int) -> None:
        """Write what is due, and wait until it is complete."""
        self._collect(wait=True)
        if self.is_due:
            self.write_due(turn)
            self._collect(wait=True)

    def close(self) -> None:
        """Finish the savepoints that are being written."""
        self._executor.shutdown(wait=True)

    def _update_due(self, run_ids: Iterable[str]) -> None:
        for run_id in run_ids:
            if (
                self._seconds[run_id] >= self._config.savepoint_after_s
                or self._operations[run_id] >= self._config.savepoint_after_operations
            ):
                self._due.add(run_id)
            else:
                self._due.discard(run_id)

    def _write_and_release(self, capture: int, run_id: str, next_seq: int, turn: int) -> SavepointRow:
        try:
            return self._write(capture, run_id, next_seq, turn)
        finally:
            self._captures.release()

    def _write(self, capture: int, run_id: str, next_seq: int, turn: int) -> SavepointRow:
        with self._store.directories.savepoint() as writing:
            digest = self._backend.write_savepoint(capture, writing.temporary)
        return SavepointRow(run_id, turn, next_seq, writing.final, writing.size_bytes, digest)

    def _finish(self, written: Sequence[Future[SavepointRow]], run_ids: AbstractSet[str], turn: int) -> bool:
        """On the writer's thread: commit the written savepoints, all of them or none."""
        try:
            self._commit(SavepointsWritten([future.result() for future in written], run_ids, turn))
        except (*WRITE_ERRORS, WorkerLost) as error:
            if not isinstance(error, WorkerLost):
                self._report_failure(error)
            self._discard([each.result() for each in written if each.exception() is None])
            return False
        return True

    def _commit(self, written: SavepointsWritten) -> None:
        """Commit savepoints, and remove the files they replace."""
        with self._store.database.transaction():
            obsolete = apply(self._store, written)
        for file in obsolete.savepoints:
            self._store.directories.remove_savepoint(file)
        self._health.fine(SUBJECT)

    def _discard(self, rows: Iterable[SavepointRow]) -> None:
        """Remove the files of savepoints that were not committed."""
        for row in rows:
            self._store.directories.remove_savepoint(row.file)

    def _collect(self, *, wait: bool = False) -> None:
        """Take note of savepoints that have been written."""
        writing = self._writing
        if writing is None or not (wait or writing.finished.done()):
            return
        self._writing = None
        if writing.finished.result():
            self._seconds -= writing.seconds
            self._operations -= writing.operations
            self._update_due(writing.operations)
        else:
            self._not_before = time.monotonic() + RETRY_S

    def _is_complete(self, run_ids: Iterable[str]) -> bool:
        """Whether these runs are in memory or over; one that could not be restored still needs its journal."""
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
            self._due.discard(run_id)

    def _report_failure(self, error: Exception) -> None:
        logger.warning("a savepoint could not be written: %s", error)
        self._health.trouble(SUBJECT, f"savepoints cannot be written ({error})")


@dataclass(frozen=True)
class SavepointJob:
    """Captures the runs whose savepoints are due; they are written while the next turns run."""

    writer: SavepointWriter
    turn: int

    def run(self, lane: Lane) -> None:
        """Capture them."""
        del lane  # the writer has its backend
        self.writer.write_due(self.turn)


def ended_runs(store: Store, live: Iterable[str]) -> Sequence[str]:
    """The runs that are over and whose journal and savepoints no live run needs: none shared a pass with them."""
    alive = set(live)
    known = store.journal.runs() | {row.run_id for row in store.savepoints.all()}
    return [run_id for run_id in known - alive if not store.journal.runs_sharing_turns([run_id]) & alive]


def forget_ended_runs(store: Store, live: Iterable[str]) -> None:
    """Drop the journal and savepoints of runs that are over, unless a live run shared a pass with them."""
    for run_id in ended_runs(store, live):
        store.journal.delete_run(run_id)
        file = store.savepoints.delete(run_id)
        if file is not None:
            store.directories.remove_savepoint(file)
