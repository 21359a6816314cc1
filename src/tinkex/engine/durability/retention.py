"""Retention: results, checkpoints with a TTL, and what ended sessions and runs held are removed in time."""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial

from tinkex.engine.config import EngineConfig
from tinkex.engine.durability.recovery import UnrecoverableRuns
from tinkex.engine.durability.savepoints import ended_runs, forget_ended_runs
from tinkex.engine.integrity import CheckpointIntegrity
from tinkex.engine.quotas import Quotas
from tinkex.engine.store import HOUR_S, CheckpointRow, RunStatus, Store, UsageKey, UsageKind

logger = logging.getLogger("tinkex.engine")

CHECKPOINTS_PER_ROUND = 200
"""Checkpoints whose files are checked in one round."""
SLICE_S = 0.01
"""How long a round occupies the engine thread before operations get their turn."""
PAUSE_S = 0.005
"""The pause between two slices of a round; writers on other threads get the database."""
CROWDED_RETENTION_S = 60.0
"""The retention of fetched results and unused snapshots of a user whose quota is nearly used up."""


class Retention:
    """Runs at intervals on the engine thread.

    ``release_run`` ends a run, ``evict_runs`` drops runs from memory, ``save_runs`` requests savepoints, ``sampled_directories``
    returns the adapters of samples that have started, and ``remove_weights`` deletes a directory of weights.
    """

    def __init__(
        self,
        config: EngineConfig,
        store: Store,
        unrecoverable: UnrecoverableRuns,
        integrity: CheckpointIntegrity,
        release_run: Callable[[str], None],
        evict_runs: Callable[[Iterable[str]], None],
        save_runs: Callable[[Iterable[str]], None],
        sampled_directories: Callable[[], Collection[str]],
        remove_weights: Callable[[str], None],
    ) -> None:
        self._config = config
        self._store = store
        self._quotas = Quotas(config, store)
        self._unrecoverable = unrecoverable
        self._integrity = integrity
        self._release_run = release_run
        self._evict_runs = evict_runs
        self._save_runs = save_runs
        self._sampled_directories = sampled_directories
        self._remove_weights = remove_weights
        self.due = time.monotonic() + config.maintenance_interval_s
        self._counted_at = time.monotonic()
        self._round: Iterator[None] | None = None
        self._lock = threading.Lock()
        self._fetched: set[str] = set()

    def fetched(self, request_id: str) -> None:
        """Record that a result reached its caller; safe on any thread, written with the next round."""
        with self._lock:
            self._fetched.add(request_id)

    def run_if_due(self, now: float) -> None:
        """Do a slice of a round if one is due; what cannot be recorded now is removed in a later round."""
        if now < self.due:
            return
        if self._round is None:
            self._round = self._steps()
        try:
            while next(self._round, self) is not self:
                if time.monotonic() - now >= SLICE_S:
                    self.due = time.monotonic() + PAUSE_S
                    return
        except sqlite3.OperationalError as error:
            logger.warning("expired objects cannot be removed: %s", error)
        self._round = None
        self.due = now + self._config.maintenance_interval_s

    def run(self) -> None:
        """Do a whole round."""
        self._round = None
        for _ in self._steps():
            pass

    def _steps(self) -> Iterator[None]:
        """A round, in steps that take a few milliseconds each and leave the database between them."""
        now = time.time()
        for _ in self._expire(now):  # first: on a full disk it frees space for the rest
            yield
        self.flush(now)
        self._count_storage(now)
        yield
        self._store.directories.remove_downloads(now - self._config.result_retention_s)
        self._release_sessions(now)
        self._release_silent_sessions(now)
        for directory in self._store.samplers.delete_replaced(self._sampled_directories()):
            self._remove_weights(directory)
        self._release_snapshots(now, self._config.snapshot_idle_s)
        crowded = self._quotas.crowded_users()
        for owner in crowded:
            self._release_snapshots(now, min(CROWDED_RETENTION_S, self._config.snapshot_idle_s), owner)
        live = self._store.runs.with_status(RunStatus.LIVE) if crowded else ()
        self._save_runs(run.run_id for run in live if run.owner in crowded)
        yield
        for prune in self._prunings(now):
            while prune():
                yield
        self._integrity.scan(CHECKPOINTS_PER_ROUND)
        yield
        alive = [
            *self._store.runs.with_status(RunStatus.LIVE, RunStatus.CREATING),
            *self._unrecoverable.kept(),
        ]
        alive_ids = [run.run_id for run in alive]
        for run_id in ended_runs(self._store, alive_ids):
            while self._store.journal.delete_bodies(run_id):
                yield
        forget_ended_runs(self._store, alive_ids)
        while self._store.database.shrink():
            yield

    def _prunings(self, now: float) -> Iterator[Callable[[], int]]:
        """Deletes a batch of rows past their retention with each call, and returns how many."""
        config, store = self._config, self._store
        yield partial(
            store.futures.prune,
            fetched_before=now - config.fetched_retention_s,
            finished_before=now - config.result_retention_s,
            expired_before=now - config.expired_retention_s,
        )
        yield partial(store.finished.prune, now - config.expired_retention_s)
        yield partial(store.copies.prune, now - config.expired_retention_s)
        yield partial(store.audit.prune, now - config.audit_retention_s)
        yield partial(store.usage.prune, now - config.usage_retention_s)
        yield from self._session_prunings(now - config.session_retention_s)
        yield store.rollouts.prune
        yield store.loop_metrics.prune
        for owner in self._quotas.crowded_users():
            fetched_retention_s = min(CROWDED_RETENTION_S, config.fetched_retention_s)
            yield partial(store.futures.expire_fetched, owner, now - fetched_retention_s)
            ended_s = min(max(config.session_grace_s, config.session_silent_s), config.session_retention_s)
            yield from self._session_prunings(now - ended_s, owner)

    def _session_prunings(self, seen_before: float, owner: str | None = None) -> Iterator[Callable[[], int]]:
        """Deletes what is left of sessions last used before a time; what others refer to is last."""
        for table in (self._store.losses, self._store.samplers, self._store.runs, self._store.sessions):
            yield partial(table.prune, seen_before, owner)

    def _release_snapshots(self, now: float, idle_s: float, owner: str | None = None) -> None:
        """Delete unnamed snapshots that newer ones have replaced and no client samples from."""
        directories = self._store.samplers.release_unused(
            now, newest_kept=self._config.newest_snapshots_kept, unused_since=now - idle_s, owner=owner
        )
        for directory in directories:
            self._remove_weights(directory)

    def _release_sessions(self, now: float) -> None:
        """Release what sessions that are over hold: their live weights and unnamed snapshots."""
        over = self._store.sessions.expired(
            now - self._config.session_grace_s, now - self._config.session_idle_s
        )
        for session_id in over:
            for run in self._store.runs.of_session(session_id):
                if run.status is RunStatus.LIVE:
                    self._release_run(run.run_id)
            for directory in self._store.samplers.release(session_id, now):
                self._remove_weights(directory)

    def _expire(self, now: float) -> Iterator[None]:
        for checkpoint in self._store.checkpoints.expired(now):
            forget_checkpoint(self._store, checkpoint)
            self._remove_weights(checkpoint.directory)
            yield
        for asset in self._store.assets.expired(now):
            self._store.assets.delete(asset)
            self._store.directories.remove_asset(asset.file)
            yield
        for upload in self._store.uploads.expired(now):
            self._store.uploads.delete(upload.upload_id)
            self._store.directories.remove(upload.directory)
            yield

    def _release_silent_sessions(self, now: float) -> None:
        """Evict the runs of sessions that finished or stopped their heartbeats; those of users with too many runs end.

        Programs that crash leave their runs behind, which must neither take memory nor count against a quota for a day.
        """
        quota = self._config.max_live_runs_per_user
        silent = [
            run
            for session_id in self._store.sessions.expired(now, now - self._config.session_silent_s)
            for run in self._store.runs.of_session(session_id)
            if run.status is RunStatus.LIVE
        ]
        self._evict_runs(run.run_id for run in silent)
        if quota is None or not silent:
            return
        total = Counter(run.owner for run in self._store.runs.with_status(RunStatus.LIVE, RunStatus.CREATING))
        for run in silent:
            if total[run.owner] > quota:
                total[run.owner] -= 1
                self._release_run(run.run_id)

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
