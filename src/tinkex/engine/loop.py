"""The engine's loop, on a thread of its own: collect reports → commit → plan → dispatch."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial

from tinkex.engine.config import EngineConfig
from tinkex.engine.durability.commit import Commit, Committer
from tinkex.engine.durability.recovery import UnrecoverableRuns
from tinkex.engine.durability.retention import Retention
from tinkex.engine.encoding import failed
from tinkex.engine.health import Health
from tinkex.engine.integrity import CheckpointIntegrity
from tinkex.engine.lane_controller import EngineParts, LaneController
from tinkex.engine.lanes.interface import Backend
from tinkex.engine.lanes.lane import Inbox, Report
from tinkex.engine.lanes.roles import LaneSpec, Role
from tinkex.engine.lookup import run_lost
from tinkex.engine.operation import Kind, Operation
from tinkex.engine.running import spans
from tinkex.engine.running.crashes import CrashTracker
from tinkex.engine.running.feeds import TokenFeeds
from tinkex.engine.running.placement import Placement
from tinkex.engine.running.sampling import cancelled
from tinkex.engine.running.sharded_passes import ShardExchange
from tinkex.engine.running.table import OperationTable
from tinkex.engine.running.waiters import Waiters
from tinkex.engine.sampler_pool import SamplerCounts, SamplerPool
from tinkex.engine.scheduler import GapTimeout, SampleRouter
from tinkex.engine.served_models import ServedModels
from tinkex.engine.store import RunStatus, Store
from tinkex.errors import EngineFailure

logger = logging.getLogger("tinkex.engine")

COMMIT_RETRY_S = 1.0
FAILURE_PAUSE_S = 1.0


class EngineLoop:
    """Plans what runs next on every lane, and commits what was computed. Its methods are called on the engine thread, except where noted.

    It never computes: lanes do, one job at a time each.
    """

    def __init__(
        self,
        config: EngineConfig,
        store: Store,
        health: Health,
        models: ServedModels,
        table: OperationTable,
        crashes: CrashTracker,
        integrity: CheckpointIntegrity,
        inbox: Inbox,
        backends: Mapping[LaneSpec, Backend],
        make_backend: Callable[[LaneSpec], Backend],
    ) -> None:
        self._store = store
        self._table = table
        self._crashes = crashes
        self._inbox = inbox
        self.committer = Committer(store, health)
        self._placement = Placement(
            store, [spec.name for spec in backends if Role.TRAIN in spec.role], table.unfinished_runs
        )
        self._router = SampleRouter(
            [spec.name for spec in backends if Role.SAMPLE in spec.role],
            can_grow=config.max_samplers is not None,
        )
        self.feeds = TokenFeeds()
        self._parts = EngineParts(
            config,
            store,
            health,
            models,
            table,
            crashes,
            integrity,
            self.committer,
            self._placement,
            self._router,
            self.feeds,
            ShardExchange(self.wake),
        )
        self.lanes: Mapping[str, LaneController] = {
            spec.name: self._controller(spec, backend) for spec, backend in backends.items()
        }
        """Replaced when samplers are added or removed, never changed, so any thread may read it."""
        self._make_backend = make_backend
        self._samplers = SamplerPool(config, table, self._router, self._start_sampler)
        self.unrecoverable = UnrecoverableRuns(config, store, health)
        self.retention = Retention(
            config,
            store,
            self.unrecoverable,
            integrity,
            self._release_run,
            self._evict_runs,
            self._save_runs,
            table.sampled_directories,
            self.remove_weights,
        )
        self.waiters = Waiters()
        self._num_reports = 0
        self._pauses = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="tinkex-engine", daemon=True)

    # ---- the loop

    def step(self, timeout: float) -> None:
        """Collect reports and calls, waiting for the first one; commit; plan; dispatch."""
        self._num_reports, num_calls, num_wake_ups = 0, 0, self._inbox.num_wake_ups
        for call in self._inbox.take(timeout):
            call()
            num_calls += 1
        if self.committer.waiting:
            self._notify(self.committer.commit())
            if self.committer.waiting:
                return
        now = time.monotonic()
        gap_deadline = self._table.next_gap_deadline()
        if gap_deadline is not None and now >= gap_deadline:
            self._expire_gaps(now)
        if num_calls > self._num_reports or self._inbox.num_wake_ups > num_wake_ups:
            for each in self.lanes.values():
                if each.lane.busy:
                    each.lane.is_wanted = True  # something may have arrived for it
        if now >= self._samplers.due and not self._stopping:
            self.lanes = self._samplers.adjust(self.lanes, now)
        idle = [each for each in self.lanes.values() if not each.lane.busy]
        if idle and not self._stopping:
            if now >= self.retention.due:
                self.retention.run_if_due(now)
            self._place()
            for each in idle:
                each.dispatch_next(now, is_paused=bool(self._pauses))

    def _place(self) -> None:
        """Pin new runs to trainers, and tell the router which samplers can be used."""
        new_ready = self._table.take_new_ready()
        if not (self._placement.has_choice or self._router.has_choice):
            return
        ready = [
            each.name for each in self.lanes.values() if each.supervisor.is_ready and not each.is_draining
        ]
        if self._placement.has_choice:
            self._placement.place(new_ready, ready)
        occupied = [
            each.name for each in self.lanes.values() if Role.SAMPLE in each.role and each.is_occupied
        ]
        if self._router.set_available(ready, occupied):
            self._table.assign_samples_again()

    def _controller(self, spec: LaneSpec, backend: Backend) -> LaneController:
        return LaneController(spec, backend, self._parts, self, self._report)

    def _start_sampler(self, spec: LaneSpec) -> LaneController:
        added = self._controller(spec, self._make_backend(spec))
        added.supervisor.start_later(time.monotonic())
        added.lane.start()
        return added

    def _report(self, report: Report) -> None:
        """Take a report; called on the thread of its lane."""
        self._inbox.put(partial(self._complete, report))

    def _complete(self, report: Report) -> None:
        self._num_reports += 1
        self.lanes[report.lane.name].complete(report)

    def wake(self) -> None:
        """Plan again soon; safe on any thread."""
        self._inbox.wake()

    # ---- outcomes

    def commit(self, *commits: Commit) -> None:
        """Commit outcomes in one transaction, and notify their waiters."""
        commits = tuple(commit for commit in commits if commit.operations)
        for commit in commits:
            spans.ended(commit.operations)
        if commits:
            self._notify(self.committer.commit(*commits))

    def _notify(self, committed: Sequence[Commit]) -> None:
        for commit in committed:
            for obsolete in commit.obsolete:
                for directory in obsolete.weights:
                    if not self._is_busy:
                        self._store.directories.remove(directory)
                    self.remove_weights(directory)
                for file in obsolete.savepoints:
                    self._store.directories.remove_savepoint(file)
            self._table.end(commit.operations)
            self.waiters.notify(commit.operations)

    def cancel(self, operation: Operation) -> None:
        """Commit the outcome of a sample that was cancelled before it started."""
        self._router.end([operation])
        self.commit(Commit(self._table.compute([operation], cancelled())))

    def _expire_gaps(self, now: float) -> None:
        for timeout in self._table.expire_gaps(now):
            for operation in timeout.expired:
                self._table.compute([operation], failed(_gap_error(operation, timeout)))
            self.commit(Commit(timeout.expired))

    # ---- runs and weights

    def end_run(self, run_id: str, status: RunStatus) -> None:
        """Accept no more operations of a run, and fail those that were accepted and have not run; not beside a job of its lane."""
        self._lane_of(run_id).forget_run(run_id)
        self._placement.forget(run_id)
        with self._table.intake_lock:
            self._store.runs.set_status(run_id, status)
            left = self._table.close_run(run_id)
        outcome = failed(run_lost(self._store, run_id))
        self.commit(Commit(self._table.compute(left, outcome)))

    def lose_run(self, run_id: str, reason: str) -> None:
        """End a run that cannot be restored."""
        self.end_run(run_id, RunStatus.CORRUPTED)
        self.unrecoverable.add(run_id, reason)

    def _release_run(self, run_id: str) -> None:
        """End a run whose session is over."""
        self._lane_of(run_id).when_idle(lambda: self.end_run(run_id, RunStatus.RELEASED))

    def _evict_runs(self, run_ids: Iterable[str]) -> None:
        """Drop runs from memory once they have no operations."""
        self._on_lanes(run_ids, lambda lane, some: lane.eviction.request(some))

    def _save_runs(self, run_ids: Iterable[str]) -> None:
        """Make savepoints of runs due."""
        self._on_lanes(run_ids, lambda lane, some: lane.savepoints.request(some))

    def _on_lanes(
        self, run_ids: Iterable[str], request: Callable[[LaneController, Sequence[str]], None]
    ) -> None:
        """Request something of the lanes that hold runs, not beside their jobs."""
        by_lane: dict[str, list[str]] = {}
        for run_id in run_ids:
            by_lane.setdefault(self._placement.lane_of(run_id), []).append(run_id)
        for name, some in by_lane.items():
            lane = self.lanes[name]
            lane.when_idle(partial(request, lane, some))

    def _lane_of(self, run_id: str) -> LaneController:
        return self.lanes[self._placement.lane_of(run_id)]

    def remove_weights(self, directory: str) -> None:
        """Remove a directory of weights that nothing refers to any more, from memory and disk; safe on any thread.

        It happens on the lanes, on one after the other: after the job that runs there, and before every one dispatched later.
        """
        lanes = iter(self.lanes.values())

        def remove() -> None:
            lane = next(lanes, None)
            if lane is None:
                self._store.directories.remove(directory)
            else:
                lane.lane.backend.drop_adapter(directory)
                lane.lane.call(remove)

        remove()

    @property
    def sampler_counts(self) -> SamplerCounts | None:
        """How many samplers there are, or None if their number is fixed; safe on any thread."""
        return self._samplers.counts(self.lanes.values())

    @property
    def live_runs(self) -> tuple[int, int]:
        """How many runs are in memory, and how many bytes they take; safe on any thread."""
        lanes = self.lanes.values()
        return sum(len(each.runs.live) for each in lanes), sum(each.runs.live_bytes for each in lanes)

    @property
    def _is_busy(self) -> bool:
        return any(each.lane.busy for each in self.lanes.values())

    def queue_trouble(self, operation: Operation | None) -> str | None:
        """Why an operation cannot run at the moment although it is ready: no worker is there for it; safe on any thread."""
        is_sample = operation is not None and operation.kind is Kind.SAMPLE
        role = Role.SAMPLE if is_sample else Role.TRAIN
        lanes = [each for each in self.lanes.values() if role in each.role]
        if not lanes:
            return "a sampler is being added"
        if operation is not None and operation.lane:
            lanes = [each for each in lanes if each.name == operation.lane] or lanes
        statuses = [each.lane.backend.status for each in lanes]
        reasons = [status.unavailable if status is not None else None for status in statuses]
        return reasons[0] if all(reasons) else None

    # ---- the thread

    def start(self) -> None:
        """Start the lanes and the engine thread; called on any other thread."""
        for each in self.lanes.values():
            each.supervisor.start()
            each.lane.start()
        self._thread.start()

    def load_models(self) -> Future[None]:
        """Load every served model on every lane before anything else runs there; safe on any thread."""
        loading = [each.supervisor.load_models() for each in self.lanes.values()]
        self._inbox.wake()
        return loading[0] if len(loading) == 1 else _all_of(loading)

    def stop(self) -> None:
        """Finish the running jobs, commit what they computed, and end the thread; called on any other thread."""
        self._stopping = True
        self._inbox.wake()
        if self._thread.is_alive():
            self._thread.join()
        for call in self._inbox.take(0):
            call()
        for each in self.lanes.values():
            each.supervisor.close()
            each.lane.close()
            each.savepoints.close()
        self._samplers.close()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Dispatch no operations while the block runs; called on any other thread."""
        self._inbox.call(lambda: self._add_pauses(1)).result()
        try:
            yield
        finally:
            self._inbox.call(lambda: self._add_pauses(-1)).result()

    def _add_pauses(self, number: int) -> None:
        self._pauses += number

    def _run(self) -> None:
        timeout = 0.0
        while not self._stopping or self._is_busy:
            try:
                self.step(timeout)
                timeout = self._timeout()
            except Exception:
                # The thread must not end, or every client would hang.
                logger.exception("the engine failed between two operations")
                timeout = FAILURE_PAUSE_S
        self._notify(self.committer.commit())

    def _timeout(self) -> float:
        """How long to wait for the next report or call."""
        if self.committer.waiting:
            return COMMIT_RETRY_S
        deadlines = [self._table.next_gap_deadline()]
        if not self._stopping:
            deadlines.append(self._samplers.due)
        idle = [each for each in self.lanes.values() if not each.lane.busy]
        if idle:
            deadlines += [self.retention.due, self._crashes.next_deadline]
            deadlines += [each.supervisor.restart_at for each in idle]
        due = min((each for each in deadlines if each is not None), default=float("inf"))
        return min(max(0.0, due - time.monotonic()), threading.TIMEOUT_MAX)


def _all_of(futures: Sequence[Future[None]]) -> Future[None]:
    """A future that ends with the last of these, or with the first error."""
    whole: Future[None] = Future()
    left = set(futures)
    lock = threading.Lock()

    def ended(future: Future[None]) -> None:
        with lock:
            left.discard(future)
            if whole.done():
                return
            error = CancelledError() if future.cancelled() else future.exception()
            if error is not None:
                whole.set_exception(error)
            elif not left:
                whole.set_result(None)

    for future in futures:
        future.add_done_callback(ended)
    return whole


def _gap_error(operation: Operation, timeout: GapTimeout) -> EngineFailure:
    return EngineFailure(
        f"operation {operation.seq_id} of run {operation.run_id} was never run: it waited for operation {timeout.missing}, "
        "which did not arrive in time. Nothing was changed; submit it again under the next number."
    )
