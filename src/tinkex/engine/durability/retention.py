"""Retention: results, checkpoints with a TTL, and what ended sessions and runs held are removed in time."""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable

from tinkex.engine.config import EngineConfig
from tinkex.engine.durability.savepoints import forget_ended_runs
from tinkex.engine.durability.unrecoverable import UnrecoverableRuns
from tinkex.engine.integrity import CheckpointIntegrity
from tinkex.engine.store import HOUR_S, CheckpointRow, RunStatus, Store, UsageKey, UsageKind

logger = logging.getLogger("tinkex.engine")

CHECKPOINTS_PER_ROUND = 200
"""Checkpoints whose files are checked in one round."""


class Retention:
    """Runs at intervals on the engine thread.

    ``release_run`` ends a run, and ``remove_weights`` deletes a directory of weights.
    """

    def __init__(
        self,
        config: EngineConfig,
        store: Store,
        unrecoverable: UnrecoverableRuns,
        integrity: CheckpointIntegrity,
        release_run: Callable[[str], None],
        remove_weights: Callable[[str], None],
    ) -> None:
        self._config = config
        self._store = store
        self._unrecoverable = unrecoverable
        self._integrity = integrity
        self._release_run = release_run
        self._remove_weights = remove_weights
        self.due = time.monotonic() + config.maintenance_interval_s
        self._counted_at = time.monotonic()
        self._lock = threading.Lock()
        self._fetched: set[str] = set()

    def fetched(self, request_id: str) -> None:
        """Record that a result reached its caller; safe on any thread, written with the next round."""
        with self._lock:
            self._fetched.add(request_id)

    def run_if_due(self, now: float) -> None:
        """Do a round if one is due; what cannot be recorded now is removed in a later one."""
        if now >= self.due:
            self.due = now + self._config.maintenance_interval_s
            try:
                self.run()
            except sqlite3.OperationalError as error:
                logger.warning("expired objects cannot be removed: %s", error)

    def run(self) -> None:
        """Do a round."""
        now = time.time()
        self._expire(now)  # first: on a full disk it frees space for the rest
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
        self._store.directories.remove_downloads(now - self._config.result_retention_s)
        self._store.finished.prune(now - self._config.expired_retention_s)
        over = self._store.sessions.expired(
            now - self._config.session_grace_s, now - self._config.session_idle_s
        )
        for session_id in over:
            for run in self._store.runs.of_session(session_id):
                if run.status is RunStatus.LIVE:
                    self._release_run(run.run_id)
            for directory in self._store.samplers.release(session_id, now):
                self._remove_weights(directory)
        self._free_runs(now)
        self._integrity.scan(CHECKPOINTS_PER_ROUND)
        alive = [
            *self._store.runs.with_status(RunStatus.LIVE, RunStatus.CREATING),
            *self._unrecoverable.kept(),
        ]
        forget_ended_runs(self._store, (run.run_id for run in alive))

    def _expire(self, now: float) -> None:
        for checkpoint in self._store.checkpoints.expired(now):
            forget_checkpoint(self._store, checkpoint)
            self._remove_weights(checkpoint.directory)
        for asset in self._store.assets.expired(now):
            self._store.assets.delete(asset)
            self._store.directories.remove_asset(asset.file)

    def _free_runs(self, now: float) -> None:
        """Where no further run fits, release the runs of sessions that ended or stopped their heartbeats, the oldest first.

        Programs that crash leave their runs behind, which must not block others for a day.
        """
        for session_id in self._store.sessions.expired(now, now - self._config.session_silent_s):
            for run in self._store.runs.of_session(session_id):
                if self._num_live() < self._config.max_live_runs:
                    return
                if run.status is RunStatus.LIVE:
                    self._release_run(run.run_id)

    def _num_live(self) -> int:
        return len(self._store.runs.with_status(RunStatus.LIVE, RunStatus.CREATING))

    def _count_storage(self, now: float) -> None:
        """Count the storage used since the last round."""
        now_s = time.monotonic()
        seconds, self._counted_at = now_s - self._counted_at, now_s
        hour = int(now) // HOUR_S * HOUR_S
        self._store.usage.add(
            {
                UsageKey(hour, owner, session_id, base_model, UsageKind.STORAGE): round(size_bytes * seconds)
                for owner, session_id, base_model, size_bytes in self._store.checkpoints.bytes_by_session(now)
            }
        )

    def flush(self, now: float) -> None:
        """Record which results have reached their callers."""
        with self._lock:
            fetched, self._fetched = self._fetched, set()
        if fetched:
            self._store.futures.mark_fetched(fetched, now)

    def close(self) -> None:
        """Record it a last time; if that fails, results only stay longer."""
        try:
            self.flush(time.time())
        except sqlite3.Error as error:
            logger.warning("which results were fetched cannot be recorded: %s", error)


def forget_checkpoint(store: Store, checkpoint: CheckpointRow) -> None:
    """Delete a checkpoint's row; on a full disk its files are removed first, which frees the space that it takes."""
    try:
        store.checkpoints.delete(checkpoint)
    except sqlite3.OperationalError as error:
        if error.sqlite_errorname != "SQLITE_FULL":
            raise
        store.directories.remove(checkpoint.directory)
        store.checkpoints.delete(checkpoint)
