"""The engine's loop, on a thread of its own: collect reports → commit → plan → dispatch."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Sequence

from tinkex.engine.config import EngineConfig
from tinkex.engine.durability.commit import Commit, Committed, Committer
from tinkex.engine.durability.replay import Replay, TrainingJob
from tinkex.engine.durability.retention import Retention
from tinkex.engine.durability.savepoints import SavepointJob, SavepointWriter
from tinkex.engine.durability.unrecoverable import UnrecoverableRuns
from tinkex.engine.encoding import failed
from tinkex.engine.health import Health
from tinkex.engine.inbox import Inbox, LoopCall
from tinkex.engine.integrity import CheckpointIntegrity
from tinkex.engine.lanes.interface import WorkerLost
from tinkex.engine.lanes.lane import Job, Lane, Report
from tinkex.engine.lookup import run_lost
from tinkex.engine.operation import Kind, Operation
from tinkex.engine.running import spans
from tinkex.engine.running.crashes import CrashTracker, quarantined
from tinkex.engine.running.sampling import DecodeBatches, DecodeJob, cancelled
from tinkex.engine.running.supervisor import LoadModelsJob, RestartJob, WorkerSupervisor
from tinkex.engine.running.table import OperationTable
from tinkex.engine.running.training import Result, TrainingRuns, TurnResult
from tinkex.engine.running.waiters import Waiters
from tinkex.engine.scheduler import FairShare, GapTimeout, Turn
from tinkex.engine.served_models import ServedModels
from tinkex.engine.store import RunStatus, Store
from tinkex.errors import EngineFailure, TinkexError

logger = logging.getLogger("tinkex.engine")

COMMIT_RETRY_S = 1.0
FAILURE_PAUSE_S = 1.0
TRAIN, DECODE = "train", "decode"


class EngineLoop:
    """Plans what runs next and commits what was computed. Its methods are called on the engine thread, except where noted.

    It never computes: lanes do, one job at a time each.
    """

    def __init__(
        self,
        config: EngineConfig,
        store: Store,
        health: Health,
        models: ServedModels,
        table: OperationTable,
        integrity: CheckpointIntegrity,
        inbox: Inbox,
        lane: Lane,
    ) -> None:
        self._config = config
        self._store = store
        self._table = table
        self._inbox = inbox
        self._lane = lane
        self.committer = Committer(store, health)
        self._crashes = CrashTracker()
        self._runs = TrainingRuns(config, store, models, lane)
        self.batches = DecodeBatches(store, models, integrity, table, self._crashes, config.max_decode_batch)
        self.savepoints = SavepointWriter(config, store, lane.backend, self._runs.live, health)
        self._replay = Replay(store, self._runs, self.savepoints)
        self.supervisor = WorkerSupervisor(lane, models, health)
        self.unrecoverable = UnrecoverableRuns(config, store, health)
        self.retention = Retention(
            config, store, self.unrecoverable, integrity, self._release_run, self.remove_weights
        )
        self.waiters = Waiters()
        self._shares = FairShare[str]()
        self._dispatched_at = 0.0
        self._pauses = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="tinkex-engine", daemon=True)

    # ---- the loop

    def step(self, timeout: float) -> None:
        """Collect reports and calls, waiting for the first one; commit; plan; dispatch."""
        for item in self._inbox.take(timeout):
            if isinstance(item, LoopCall):
                item.run()
            else:
                self._complete(item)
        self._notify(self.committer.retry())
        if self.committer.is_behind:
            return
        now = time.monotonic()
        self._expire_gaps(now)
        if self._lane.busy or self._stopping:
            return
        # Retention deletes rows and files that a running job may need.
        self.retention.run_if_due(now)
        job = self._plan(now)
        if job is not None:
            self._dispatched_at = time.monotonic()
            self._lane.dispatch(job)

    def _plan(self, now: float) -> Job | None:
        """The job that runs next; training and sampling share the time equally while both have work."""
        try:
            job = self.supervisor.next_job(now)
        except WorkerLost as lost:
            self._lose_lane(lost, None)
            return None
        if job is not None or not self.supervisor.is_ready or self._pauses:
            return job
        if self.savepoints.is_due:
            return SavepointJob(self.savepoints, self.committer.turn)
        wanting = [TRAIN] * self._table.has_training() + [DECODE] * bool(self._table.models_with_samples())
        if not wanting:
            return None
        self._shares.waiting(wanting)
        if self._shares.pick(wanting) == DECODE:
            decode, rejected = self.batches.next_job()
            self._commit(Commit(rejected))
            if decode is None:
                self._inbox.wake()  # others may wait
            return decode
        turn = self._table.next_turn(self._config.max_tokens_per_pass)
        if turn is None:
            return None
        self.committer.turn += 1
        return TrainingJob(turn, self.committer.turn, self._runs, self._replay, self.savepoints)

    def _complete(self, report: Report) -> None:
        """Take the report of a job, and commit what it computed."""
        report.lane.busy = False
        if report.lost is not None:
            self._lose_lane(report.lost, report.job)
            return
        match report.job:
            case TrainingJob():
                self._charge(TRAIN)
                self._complete_turn(report.job, report.result or self._failed_turn(report))
            case DecodeJob():
                self._charge(DECODE)
                if report.error is None:
                    ended = self.batches.complete(report.job, report.result)
                else:
                    ended = self.batches.fail(report.job, report.error)
                self._crashes.clear(operation.request_id for operation in ended)
                self._commit(Commit(ended))
            case RestartJob():
                self.supervisor.restarted()
            case LoadModelsJob():
                self.supervisor.loaded(report.error)
            case _ if report.error is not None:
                logger.error("a job of the engine failed", exc_info=report.error)

    def _charge(self, party: str) -> None:
        self.supervisor.record_success()
        self._shares.charge(party, time.monotonic() - self._dispatched_at)

    def _complete_turn(self, job: TrainingJob, result: TurnResult) -> None:
        """Commit a turn and everything that it changed."""
        operations = [
            self._table.compute(each.operation, each.outcome, ran=each.ran, usage=each.usage)
            for each in result.results
        ]
        for run_id, reason in result.unrecoverable.items():
            self._lose_run(run_id, reason)
        self._commit(Commit(operations, job.number, result.changes))
        self._crashes.clear([*(each.request_id for each in operations), *self._runs.live])
        first, succeeded = operations[0], result.results[0].succeeded
        if succeeded and first.kind is Kind.UNLOAD:
            self._release_run(first.run_id)
        elif not succeeded and first.seq_id == 0:
            self._end_run(first.run_id, RunStatus.FAILED)

    def _failed_turn(self, report: Report) -> TurnResult:
        """The result of a turn that failed as a whole; its runs are restored when they are next used."""
        assert isinstance(report.job, TrainingJob)
        error, operations = report.error, report.job.turn.operations
        if not isinstance(error, TinkexError):
            logger.error("a training turn failed unexpectedly", exc_info=error)
            error = EngineFailure(f"the engine failed: {type(error).__name__}: {error}")
        for operation in operations:
            self._forget_run(operation.run_id)
        return TurnResult([Result(operation, failed(error), ran=False) for operation in operations])

    def _lose_lane(self, lost: WorkerLost, job: Job | None) -> None:
        """The transition of a lost lane: what ran on it is queued again or quarantined, and what it held is forgotten.

        Nothing of it was committed, so it has not happened. Runs are restored as after a restart.
        """
        self.supervisor.record_loss(lost, time.monotonic())
        self._lane.forget_models()
        self._runs.live.clear()
        self.savepoints.reset()
        self.batches.reset()
        turns: Sequence[Turn] = []
        ended: list[Operation] = []
        samples = list(self._table.all_running_samples())
        if isinstance(job, TrainingJob):
            turns = [job.turn]
            if lost.replaying:
                self._quarantine_runs(lost)
            else:
                self._crashes.record_crash([each.request_id for each in job.turn.operations], lost)
                turns = self._crashes.turns_to_retry(job.turn)
                if not turns:
                    ended += job.turn.operations
        elif isinstance(job, DecodeJob):
            decoded = [each for each in samples if each.model == job.model.source]
            self._crashes.record_crash([each.request_id for each in decoded], lost)
            if len(decoded) == 1 and self._crashes.is_quarantined(decoded[0].request_id):
                ended += decoded
                samples.remove(decoded[0])
        for operation in ended:
            self._table.compute(operation, failed(quarantined(lost)))
        left = [operation for operation in samples if operation.cancelled]
        ended += [self._table.compute(operation, cancelled()) for operation in left]
        self._table.requeue(turns, [operation for operation in samples if not operation.cancelled])
        self._crashes.clear(operation.request_id for operation in ended)
        self._commit(Commit(ended))

    def _quarantine_runs(self, lost: WorkerLost) -> None:
        """Give up runs whose replay crashes the worker every time; one that was killed from outside proves nothing.

        What they did once worked, and would be lost for good: nobody loses a run because somebody killed processes.
        """
        if lost.own_fault:
            self._crashes.record_crash(lost.replaying, lost)
        for run_id in lost.replaying:
            if self._crashes.is_quarantined(run_id):
                self._replay.exclude(run_id)
                self._lose_run(run_id, f"the worker was lost every time it was restored ({lost.reason})")

    # ---- outcomes

    def _commit(self, commit: Commit) -> None:
        """Commit outcomes in one transaction, and notify their waiters."""
        if commit.operations:
            spans.ended(commit.operations)
            self._notify(self.committer.commit(commit))

    def _notify(self, committed: Sequence[Committed]) -> None:
        for each in committed:
            for obsolete in each.obsolete:
                for directory in obsolete.weights:
                    self._store.directories.remove(directory)  # the lane is idle
                    self.remove_weights(directory)
                for file in obsolete.savepoints:
                    self._store.directories.remove_savepoint(file)
            self._table.end(each.operations)
            self.waiters.notify(each.operations)

    def complete_cancelled(self, operation: Operation) -> None:
        """Commit the outcome of a sample that was cancelled before it started."""
        self._commit(Commit([self._table.compute(operation, cancelled())]))

    def _expire_gaps(self, now: float) -> None:
        expired = [
            self._table.compute(operation, failed(_gap_error(operation, timeout)))
            for timeout in self._table.expire_gaps(now)
            for operation in timeout.expired
        ]
        self._commit(Commit(expired))

    # ---- runs and weights

    def _release_run(self, run_id: str) -> None:
        self._end_run(run_id, RunStatus.RELEASED)

    def _lose_run(self, run_id: str, reason: str) -> None:
        self._end_run(run_id, RunStatus.CORRUPTED)
        self.unrecoverable.add(run_id, reason)

    def _end_run(self, run_id: str, status: RunStatus) -> None:
        """Accept no more operations of a run, and fail those that were accepted and have not run."""
        self._forget_run(run_id)
        with self._table.intake_lock:
            self._store.runs.set_status(run_id, status)
            left = self._table.close_run(run_id)
        outcome = failed(run_lost(self._store, run_id))
        self._commit(Commit([self._table.compute(operation, outcome) for operation in left]))

    def _forget_run(self, run_id: str) -> None:
        self._lane.call(lambda: self._runs.forget(run_id))

    def remove_weights(self, directory: str) -> None:
        """Remove a directory of weights that nothing refers to any more, from memory and disk; safe on any thread.

        It happens on the lane: after the running job, and before every job that is dispatched from now on.
        """

        def remove() -> None:
            self._lane.backend.drop_adapter(directory)
            self._store.directories.remove(directory)

        self._lane.call(remove)

    @property
    def num_live_runs(self) -> int:
        """How many runs are in memory; safe on any thread."""
        return len(self._runs.live)

    # ---- the thread

    def start(self) -> None:
        """Start the lane and the engine thread; called on any other thread."""
        self.supervisor.start()
        self._lane.start()
        self._thread.start()

    def stop(self) -> None:
        """Finish the running job, commit what it computed, and end the thread; called on any other thread."""
        self._stopping = True
        self._inbox.wake()
        if self._thread.is_alive():
            self._thread.join()
        for item in self._inbox.take(0):
            if isinstance(item, LoopCall):
                item.future.cancel()
        self.supervisor.close()
        self._lane.close()
        self.savepoints.close()

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
        while not self._stopping or self._lane.busy:
            try:
                self.step(timeout)
                timeout = self._timeout()
            except Exception:
                # The thread must not end, or every client would hang.
                logger.exception("the engine failed between two operations")
                timeout = FAILURE_PAUSE_S
        self._notify(self.committer.retry())

    def _timeout(self) -> float:
        """How long to wait for the next report or call."""
        if self.committer.is_behind:
            return COMMIT_RETRY_S
        deadlines = [self._table.next_gap_deadline()]
        if not self._lane.busy:
            deadlines += [self.retention.due, self.supervisor.restart_at]
        due = min((each for each in deadlines if each is not None), default=float("inf"))
        return min(max(0.0, due - time.monotonic()), threading.TIMEOUT_MAX)


def _gap_error(operation: Operation, timeout: GapTimeout) -> EngineFailure:
    return EngineFailure(
        f"operation {operation.seq_id} of run {operation.run_id} was never run: it waited for operation {timeout.missing}, "
        "which did not arrive in time. Nothing was changed; submit it again under the next number."
    )
