"""Clearing away what has had its time: results, checkpoints with a TTL, what ended sessions and runs held."""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable

from tinkex.engine.backend.seam import Backend
from tinkex.engine.config import EngineConfig
from tinkex.engine.operations.intact import Intact
from tinkex.engine.operations.lost import LostRuns
from tinkex.engine.operations.savepoints import forget_ended
from tinkex.engine.store import HOUR_S, Account, CheckpointRow, RunStatus, Store, UsageKind

logger = logging.getLogger("tinkex.engine")

AT_ONCE = 200
"""Checkpoints whose files are looked for in one round."""


class Maintenance:
    """Runs every now and then on the engine thread, between two operations."""

    def __init__(
        self,
        config: EngineConfig,
        store: Store,
        backend: Backend,
        release_run: Callable[[str], None],
        lost_runs: LostRuns,
        intact: Intact,
    ) -> None:
        self._config = config
        self._store = store
        self._backend = backend
        self._release_run = release_run
        self._lost_runs = lost_runs
        self._intact = intact
        self.due = time.monotonic() + config.maintenance_interval_s
        self._counted = time.monotonic()
        self._lock = threading.Lock()
        self._fetched: set[str] = set()

    def fetched(self, request_id: str) -> None:
        """Note, from any thread, that a result reached its caller; recorded with the next round."""
        with self._lock:
            self._fetched.add(request_id)

    def run_if_due(self, now: float) -> None:
        """Do a round if the last one is long enough ago; what cannot be recorded now is cleared away in a later one."""
        if now >= self.due:
            self.due = now + self._config.maintenance_interval_s
            try:
                self.run()
            except sqlite3.OperationalError as error:
                logger.warning("what has had its time cannot be cleared away: %s", error)

    def run(self) -> None:
        """Do a round."""
        now = time.time()
        self._expire(now)  # first: on a full disk it makes room for the rest
        self.flush(now)
        self._count_storage(now)
        self._store.futures.prune(
            fetched_before=now - self._config.fetched_retention_s,
            finished_before=now - self._config.result_retention_s,
            expired_before=now - self._config.expired_retention_s,
        )
        self._store.audit.prune(now - self._config.audit_retention_s)
        self._store.usage.prune(now - self._config.usage_retention_s)
        self._store.copies.prune(now - self._config.expired_retention_s)
        self._store.directories.clear_downloads(now - self._config.result_retention_s)
        self._store.finished.prune(now - self._config.expired_retention_s)
        over = self._store.sessions.over(
            now - self._config.session_grace_s, now - self._config.session_idle_s
        )
        for session_id in over:
            for run in self._store.runs.of_session(session_id):
                if run.status is RunStatus.LIVE:
                    self._release_run(run.run_id)
            for directory in self._store.samplers.release(session_id, now):
                self.remove(directory)
        self._make_room(now)
        self._intact.look_over(AT_ONCE)
        alive = [
            *self._store.runs.with_status(RunStatus.LIVE, RunStatus.CREATING),
            *self._lost_runs.kept(),
        ]
        forget_ended(self._store, (run.run_id for run in alive))

    def _expire(self, now: float) -> None:
        for checkpoint in self._store.checkpoints.expired(now):
            forget_checkpoint(self._store, checkpoint)
            self.remove(checkpoint.directory)
        for asset in self._store.assets.expired(now):
            self._store.assets.delete(asset)
            self._store.directories.remove_asset(asset.file)

    def _make_room(self, now: float) -> None:
        """Where no further run fits, the runs of sessions that ended or fell silent go early, the oldest first.

        Programs that end without a word leave their runs behind; they must not keep the next ones waiting for a day.
        """
        for session_id in self._store.sessions.over(now, now - self._config.session_silent_s):
            for run in self._store.runs.of_session(session_id):
                if self._num_live() < self._config.max_live_runs:
                    return
                if run.status is RunStatus.LIVE:
                    self._release_run(run.run_id)

    def _num_live(self) -> int:
        return len(self._store.runs.with_status(RunStatus.LIVE, RunStatus.CREATING))

    def _count_storage(self, now: float) -> None:
        """Count what was kept since the last round."""
        seconds, self._counted = time.monotonic() - self._counted, time.monotonic()
        hour = int(now) // HOUR_S * HOUR_S
        self._store.usage.add(
            {
                Account(hour, owner, session_id, base_model, UsageKind.STORAGE): round(size_bytes * seconds)
                for owner, session_id, base_model, size_bytes in self._store.checkpoints.kept(now)
            }
        )

    def flush(self, now: float) -> None:
        """Record which results have reached their callers."""
        with self._lock:
            fetched, self._fetched = self._fetched, set()
        if fetched:
            self._store.futures.fetched(fetched, now)

    def close(self) -> None:
        """Do the same at the end; where it cannot be recorded, results only stay longer."""
        try:
            self.flush(time.time())
        except sqlite3.Error as error:
            logger.warning("which results were fetched cannot be recorded: %s", error)

    def remove(self, directory: str) -> None:
        """Remove weights that nothing names any more, from memory and from disk."""
        self._backend.drop_adapter(directory)
        self._store.directories.remove(directory)


def forget_checkpoint(store: Store, checkpoint: CheckpointRow) -> None:
    """Forget a checkpoint; on a full disk its files go first, and make the room that recording it takes."""
    try:
        store.checkpoints.delete(checkpoint)
    except sqlite3.OperationalError as error:
        if error.sqlite_errorname != "SQLITE_FULL":
            raise
        store.directories.remove(checkpoint.directory)
        store.checkpoints.delete(checkpoint)
