"""Runs that cannot be restored: each fails alone, is named in the log and counted in health, and is tried again at the next start.

What is left of such a run is kept as long as its session would have kept it: a file that was only missing can be put back, and
a replay that ran out of memory may find more of it.
"""

from __future__ import annotations

import logging
import time

from tinkex.engine.config import EngineConfig
from tinkex.engine.health import Health
from tinkex.engine.lanes.interface import CorruptState
from tinkex.engine.store import RunRow, RunStatus, Store, file_digest

logger = logging.getLogger("tinkex.engine")

SUBJECT = "runs"


class UnrecoverableRuns:
    """The runs that could not be restored since the start. Only called on the engine thread."""

    def __init__(self, config: EngineConfig, store: Store, health: Health) -> None:
        self._config = config
        self._store = store
        self._health = health
        self._run_ids: set[str] = set()

    def add(self, run_id: str, reason: object) -> None:
        """Record that a run cannot be restored, and why."""
        logger.error("run %s cannot be restored: %s", run_id, reason)
        self._run_ids.add(run_id)
        self._update_health()

    def kept(self) -> list[RunRow]:
        """The unrecoverable runs of which something is left, and whose sessions are not over."""
        now = time.time()
        left = self._store.journal.runs() | {row.run_id for row in self._store.savepoints.all()}
        runs = [
            run
            for run in self._store.runs.with_status(RunStatus.CORRUPTED)
            if run.run_id in left and not self._is_over(run, now)
        ]
        kept = {run.run_id for run in runs}
        if self._run_ids - kept:
            self._run_ids &= kept
            self._update_health()
        return runs

    def _is_over(self, run: RunRow, now: float) -> bool:
        session = self._store.sessions.get(run.session_id)
        return session is None or (
            session.seen_at < now - self._config.session_idle_s
            or (session.finished_at or now) < now - self._config.session_grace_s
        )

    def _update_health(self) -> None:
        reason = (
            f"{len(self._run_ids)} runs could not be restored; the log says which and why. Put missing files back, then start the "
            "server again; or have their owners continue from checkpoints"
        )
        self._health.note(SUBJECT, reason if self._run_ids else None)


def check_files(store: Store, run_id: str) -> None:
    """Raise :class:`CorruptState` if the savepoint file of a run is not there in full; its contents are checked when it is read."""
    savepoint = store.savepoints.get(run_id)
    if savepoint is not None:
        path = store.directories.resolve(savepoint.file)
        if not path.is_file() or path.stat().st_size != savepoint.size_bytes:
            raise CorruptState(f"its savepoint {savepoint.file} is missing or truncated")


def check_contents(store: Store, run_id: str) -> None:
    """Raise :class:`CorruptState` if anything that a run would be restored from is not as it was written."""
    check_files(store, run_id)
    savepoint = store.savepoints.get(run_id)
    if savepoint is not None and file_digest(store.directories.resolve(savepoint.file)) != savepoint.digest:
        raise CorruptState(f"its savepoint {savepoint.file} is corrupt")
    for entry in store.journal.turns([run_id]):
        row = store.journal.get(entry.request_id)
        if row is None or not row.intact:
            raise CorruptState(f"the journal of its operation {entry.seq_id} is corrupt")
