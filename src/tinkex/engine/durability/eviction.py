"""Eviction: runs that do not fit in memory wait on disk.

An evicted run is its savepoint, and is restored bit for bit when an operation needs it. So memory limits how many runs are
trained at a time, and not how many there are: programs that exit without closing their sessions block no other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass

from tinkex.engine.config import EngineConfig
from tinkex.engine.durability.savepoints import SavepointWriter
from tinkex.engine.lanes.interface import WorkerLost
from tinkex.engine.lanes.lane import Lane
from tinkex.engine.log_limit import LogLimit
from tinkex.engine.operation import Operation
from tinkex.engine.quotas import Quotas
from tinkex.engine.running.training import TrainingRuns
from tinkex.engine.scheduler import RunLimits
from tinkex.engine.store import Store
from tinkex.errors import EngineError

logger = logging.getLogger("tinkex.engine")


class Eviction:
    """Keeps the runs in memory within ``max_live_bytes`` and ``max_live_runs``, least recently used first.

    Called by jobs on the lane's thread, and by the loop while the lane is idle; everything that ran must be committed.
    ``unfinished_runs`` returns the runs with operations that have not ended: they are evicted last.
    """

    def __init__(
        self,
        config: EngineConfig,
        store: Store,
        runs: TrainingRuns,
        savepoints: SavepointWriter,
        unfinished_runs: Callable[[], AbstractSet[str]],
    ) -> None:
        self._store = store
        self._quotas = Quotas(config, store)
        self._runs = runs
        self._savepoints = savepoints
        self._unfinished_runs = unfinished_runs
        self._max_bytes = config.live_bytes_limit
        self._max_runs = config.max_live_runs
        self._requested: set[str] = set()
        self._is_trimmed = True
        self._log_limit = LogLimit()
        self.num_evicted = 0
        """How many runs were evicted since the start."""

    def limits(self, run_ids: Iterable[str]) -> RunLimits:
        """What a turn may need, with the sizes of these runs."""
        sizes = {run_id: self._runs.run_bytes(run_id) for run_id in run_ids}
        return RunLimits(self._max_bytes, self._max_runs, sizes)

    def request(self, run_ids: Iterable[str]) -> None:
        """Evict runs that are not expected to be used, once they have no operations."""
        self._requested.update(run_id for run_id in run_ids if run_id in self._runs.live)

    @property
    def is_due(self) -> bool:
        """Whether runs have to leave memory although no other needs the room."""
        return bool(self._requested) or (not self._is_trimmed and self._is_exceeded())

    def evict_due(self, turn: int, is_wanted: Callable[[], bool]) -> None:
        """Evict the requested runs, and idle ones above the limits; ``turn`` is the last one committed.

        If something else ``is_wanted`` it ends after one of the requested runs, and the others stay due.
        """
        unfinished = self._unfinished_runs()
        requested, self._requested = self._requested, set()
        idle = [run_id for run_id in self._idle(unfinished) if run_id in requested]
        for number, run_id in enumerate(idle):
            if number and is_wanted():
                self._requested.update(idle[number:])
                return
            self._evict([run_id], turn)
        self._is_trimmed = True
        self._evict_above_limits(self._idle(unfinished), 0, 0, turn)

    def has_room(self, num_bytes: int) -> bool:
        """Whether so many bytes fit beside the runs in memory; safe on any thread."""
        return not self._is_exceeded(num_bytes)

    def make_room(self, operations: Sequence[Operation], turn: int) -> None:
        """Evict runs until those of the operations fit, with all that are restored together with them.

        If they do not fit even then (the limits were higher when they last ran together), they exceed the limits for one job.
        """
        live = self._runs.live
        used = {operation.run_id for operation in operations}
        missing = used - live.keys()
        self._is_trimmed = False
        if not missing and not self._is_exceeded():
            return
        missing |= self._store.journal.runs_sharing_turns(missing) - live.keys()
        self._load_models(missing)
        creating = {each.run_id: self._runs.new_run_bytes(each) for each in operations if each.seq_id == 0}
        num_bytes = sum(creating.get(run_id, self._runs.run_bytes(run_id)) for run_id in missing)
        if self._is_exceeded(num_bytes, len(missing)):
            self._runs.copies.drop(list(self._runs.copies))
        if self._is_exceeded(num_bytes, len(missing)):
            unfinished = self._unfinished_runs()
            idle = list(self._idle(unfinished | used))
            others = [run_id for run_id in self._idle(used) if run_id not in idle]
            self._evict_above_limits([*idle, *others], num_bytes, len(missing), turn)

    def check_fits(self, operation: Operation) -> None:
        """Raise ``InvalidInput`` if the run that an operation creates does not fit in memory, however many are evicted."""
        self._quotas.check_run_size(self._runs.new_run_bytes(operation))

    def _is_exceeded(self, num_bytes: int = 0, num_runs: int = 0) -> bool:
        """Whether the runs in memory, and so many more, are too many."""
        limits = RunLimits(self._max_bytes, self._max_runs)
        return limits.are_exceeded(self._runs.live_bytes + num_bytes, len(self._runs.live) + num_runs)

    def _idle(self, others: AbstractSet[str]) -> Iterator[str]:
        """The runs in memory that are not among ``others``, least recently used first."""
        for run in sorted(self._runs.live.values(), key=lambda run: run.used_at):
            if run.run_id not in others and run.run_id not in self._runs.suspended_runs:
                yield run.run_id

    def _evict_above_limits(
        self, candidates: Iterable[str], num_bytes: int, num_runs: int, turn: int
    ) -> None:
        evicted: list[str] = []
        freed = 0
        for run_id in candidates:
            if not self._is_exceeded(num_bytes - freed, num_runs - len(evicted)):
                break
            evicted.append(run_id)
            freed += self._runs.run_bytes(run_id)
        total = self._log_limit.count(self._evict(evicted, turn)) if evicted else 0
        if total:
            logger.warning(
                "evicted %d runs to disk to make room for others; %d runs with %d bytes are in memory (max_live_bytes: %d, "
                "max_live_runs: %s)",
                total,
                len(self._runs.live),
                self._runs.live_bytes,
                self._max_bytes,
                "no limit" if self._max_runs is None else self._max_runs,
            )

    def _evict(self, run_ids: Iterable[str], turn: int) -> int:
        """Write savepoints of runs and drop them from memory; returns how many. One that cannot be written stays."""
        num_evicted = 0
        try:
            for run_id in run_ids:
                if self._savepoints.save_now(run_id, turn):
                    self._runs.forget(run_id)
                    num_evicted += 1
        except WorkerLost as lost:
            lost.evicting = True
            raise
        self.num_evicted += num_evicted
        return num_evicted

    def _load_models(self, run_ids: Iterable[str]) -> None:
        """Load the base models of runs that were not loaded yet, so that their sizes are known."""
        for run_id in run_ids:
            row = self._store.runs.get(run_id)
            if row is not None:
                with suppress(EngineError):  # which is the error of what needs the model
                    self._runs.find_model(row.base_model)


@dataclass(frozen=True)
class EvictionJob:
    """Evicts runs of sessions that are over, and those above the limits."""

    eviction: Eviction
    turn: int

    def run(self, lane: Lane) -> None:
        """Evict them, or some of them if something else waits."""
        self.eviction.evict_due(self.turn, lambda: lane.is_wanted)
