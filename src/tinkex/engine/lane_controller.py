"""What one lane holds, what it does next, and what becomes of it: the part of the loop that exists once per lane."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Protocol

from tinkex.engine.config import EngineConfig
from tinkex.engine.durability.commit import Commit, Committer
from tinkex.engine.durability.eviction import Eviction, EvictionJob
from tinkex.engine.durability.replay import Replay, TrainingJob, TurnResult
from tinkex.engine.durability.savepoints import SavepointJob, SavepointWriter
from tinkex.engine.encoding import failed
from tinkex.engine.health import Health
from tinkex.engine.integrity import CheckpointIntegrity
from tinkex.engine.lanes.interface import Backend, NoFreeNode, WorkerLost
from tinkex.engine.lanes.lane import Job, Lane, Report
from tinkex.engine.lanes.roles import LaneSpec, Role, lane_config, num_lanes
from tinkex.engine.operation import Kind, Operation
from tinkex.engine.running.crashes import CrashTracker, quarantined
from tinkex.engine.running.feeds import TokenFeeds
from tinkex.engine.running.placement import Placement
from tinkex.engine.running.sampling import DecodeBatches, DecodeJob, cancelled
from tinkex.engine.running.sharded_passes import ShardExchange, ShardJob
from tinkex.engine.running.supervisor import LoadModelsJob, WorkerSupervisor
from tinkex.engine.running.table import OperationTable
from tinkex.engine.running.training import TrainingRuns
from tinkex.engine.scheduler import FairShare, MayRun, SampleRouter, Turn, always
from tinkex.engine.served_models import ServedModels
from tinkex.engine.store import RunStatus, Store
from tinkex.errors import EngineFailure, InvalidInput, TinkexError

logger = logging.getLogger("tinkex.engine")

MAX_RUNS_EXAMINED = 16
"""How many runs that are not in memory may run beside a suspended pass."""
TRAIN, DECODE = "train", "decode"


@dataclass(frozen=True)
class EngineParts:
    """What all lanes share."""

    config: EngineConfig
    store: Store
    health: Health
    models: ServedModels
    table: OperationTable
    crashes: CrashTracker
    integrity: CheckpointIntegrity
    committer: Committer
    placement: Placement
    router: SampleRouter
    feeds: TokenFeeds
    exchange: ShardExchange


class LoopCalls(Protocol):
    """What a lane asks of the loop."""

    def commit(self, *commits: Commit) -> None:
        """Commit outcomes, and notify their waiters."""
        ...

    def wake(self) -> None:
        """Plan again soon."""
        ...

    def end_run(self, run_id: str, status: RunStatus) -> None:
        """Accept no more operations of a run, and fail those that have not run."""
        ...

    def lose_run(self, run_id: str, reason: str) -> None:
        """End a run that cannot be restored."""
        ...


class LaneController:
    """Plans the jobs of one lane and completes them. Only called on the engine thread, except where noted.

    A lane that trains has the runs that are pinned to it in its memory; one that samples has decode batches. With both roles
    they share its time equally while both have work.
    """

    def __init__(
        self,
        spec: LaneSpec,
        backend: Backend,
        parts: EngineParts,
        loop: LoopCalls,
        on_report: Callable[[Report], None],
    ) -> None:
        config, name = lane_config(parts.config, spec), spec.name
        has_several_lanes = num_lanes(parts.config) > 1
        self.name = name
        self.role = spec.role
        self.lane = Lane(name, backend, on_report)
        self._config = config
        self._store = parts.store
        self._table = parts.table
        self._crashes = parts.crashes
        self._committer = parts.committer
        self._placement = parts.placement
        self._loop = loop
        self._exchange = parts.exchange
        self.runs = TrainingRuns(config, parts.store, parts.models, backend, parts.exchange)
        self.batches = DecodeBatches(
            name,
            parts.store,
            parts.models,
            parts.integrity,
            parts.table,
            parts.crashes,
            parts.router,
            parts.feeds,
            config.max_decode_batch,
        )
        self.savepoints = SavepointWriter(config, parts.store, backend, self.runs.live, parts.health)
        self.eviction = Eviction(config, parts.store, self.runs, self.savepoints, parts.table.unfinished_runs)
        self._replay = Replay(parts.store, self.runs, self.savepoints)
        subject = f"worker {name}" if has_several_lanes else "worker"
        self.supervisor = WorkerSupervisor(self.lane, parts.models, parts.health, subject)
        self._shares = FairShare[str]()
        self._job: Job | None = None
        """The last job that was dispatched."""
        self._dispatched_at = 0.0
        self._suspended: TrainingJob | None = None
        """A pass whose custom losses take long: it continues in turns with the operations of others."""
        self._others_first = False
        """Whether something else is dispatched before the suspended pass, if there is something."""
        self._evicts = False
        """Whether the last job evicted runs."""
        self._deferred: deque[Callable[[], None]] = deque()
        self.refused: str | None = None
        """Why the lane cannot be started, so that it is removed."""

    @property
    def is_draining(self) -> bool:
        """Whether the lane gets no more samples, because it is removed when it has finished those that it has."""
        return self.batches.is_closed

    @is_draining.setter
    def is_draining(self, value: bool) -> None:
        self.batches.is_closed = value

    @property
    def is_empty(self) -> bool:
        """Whether the lane computes nothing and holds no samples."""
        return not self.lane.busy and not self._table.running_samples(self.name)

    def end(self) -> None:
        """End the lane and its worker, after its last job; called on any other thread."""
        self.supervisor.close()
        self.lane.close()
        self.savepoints.close()
        self.lane.backend.close()

    @property
    def is_occupied(self) -> bool:
        """Whether the lane cannot let samples join soon: it does something else, or its worker does not run."""
        is_decoding = isinstance(self._job, DecodeJob)
        return not self.supervisor.is_ready or (self.lane.busy and not is_decoding)

    def when_idle(self, function: Callable[[], None]) -> None:
        """Call a function now, or as soon as the running job has been completed: not beside one."""
        if self.lane.busy:
            self._deferred.append(function)
        else:
            function()

    def forget_run(self, run_id: str) -> None:
        """Drop a run from the lane's memory, if it is there, before the next job."""
        self.lane.call(lambda: self.runs.forget(run_id))

    # ---- planning

    def dispatch_next(self, now: float, *, is_paused: bool) -> None:
        """Dispatch what the lane does next, if there is something."""
        if self.refused is not None:
            return
        job = self._plan(now, is_paused=is_paused)
        if job is not None:
            self._job = job
            self._dispatched_at = time.monotonic()
            self.lane.dispatch(job)

    def _plan(self, now: float, *, is_paused: bool) -> Job | None:
        """The job that runs next; training and sampling share the time equally while both have work."""
        try:
            job = self.supervisor.next_job(now)
        except WorkerLost as lost:
            self._lose(lost, None)
            return None
        if job is not None or not self.supervisor.is_ready or is_paused:
            return job
        if self.savepoints.is_due:
            return SavepointJob(self.savepoints, self._committer.turn)
        delayed = self._crashes.delayed_users
        may_run = self._may_run() if Role.TRAIN in self.role else None
        has_turn = may_run is not None and self._table.has_training(delayed, may_run, self._own_runs())
        has_training = has_turn or self._suspended is not None
        has_samples = Role.SAMPLE in self.role and bool(self._table.queued_samples(self.name))
        wanting = [TRAIN] * has_training + [DECODE] * has_samples
        self._evicts = self.eviction.is_due and not (self._evicts and wanting)  # in turns with operations
        if self._evicts:
            return EvictionJob(self.eviction, self._committer.turn)
        if not wanting:
            return self._find_shards() if Role.TRAIN in self.role else None
        self._shares.waiting(wanting)
        if self._shares.pick(wanting) == DECODE:
            decode, rejected = self.batches.next_job(is_alone=wanting == [DECODE])
            self._loop.commit(Commit(rejected))
            if decode is None and rejected:
                self._loop.wake()  # others may wait
            if decode is not None or not has_training:
                return decode  # None: what is queued is for other lanes
        if self._suspended is not None and not (self._others_first and has_turn):
            resumed, self._suspended = self._suspended, None
            # The last number is the one that counts: what is committed before it ends comes before it.
            self._committer.turn += 1
            resumed.number = self._committer.turn
            return resumed
        self._others_first = False
        assert may_run is not None, "only a trainer has training"
        return self._plan_turns(delayed, may_run)

    def _find_shards(self) -> ShardJob | None:
        """Shards of a pass of another trainer, if there are some and its adapter and a gradient fit in memory here."""
        copies = self.runs.copies
        obsolete = [adapter for adapter in copies if not self._exchange.is_current(adapter)]
        if obsolete:
            self.lane.call(lambda: copies.drop(obsolete))
        sharded = self._exchange.find()
        if sharded is None:
            return None
        num_buffers = 1 if sharded.adapter.key in copies else 2
        if not self.eviction.has_room(num_buffers * sharded.adapter.num_bytes):
            return None
        return ShardJob(sharded, copies)

    def _plan_turns(self, delayed: AbstractSet[str], may_run: MayRun) -> TrainingJob | None:
        sharing = self._config.prefix_sharing
        turns = self._table.next_turns(
            self._config.max_tokens_per_pass,
            delayed,
            self.eviction.limits(self._table.ready_runs(self._own_runs())),
            may_run,
            lane=self.name,
            among=self._own_runs(),
            share_prefixes=sharing
            and not self._config.deterministic,  # which gives every operation its own pass
            max_shared_tokens=self._config.shard_tokens,
        )
        if not turns:
            return None
        turns = [kept for turn in turns if (kept := self._without_quarantined(turn))]
        if not turns:
            self._loop.wake()  # others may wait
            return None
        first = self._committer.turn + 1
        self._committer.turn += len(turns)
        return TrainingJob(
            turns, first, self.runs, self._replay, self.savepoints, self.eviction, prefix_sharing=sharing
        )

    def _own_runs(self) -> AbstractSet[str] | None:
        """The runs that are pinned to this lane; None if all are."""
        return self._placement.runs_on(self.name) if self._placement.has_choice else None

    def _may_run(self) -> MayRun:
        """Which operations may run now: all, or those that a suspended pass allows."""
        return always if self._suspended is None else self._beside_suspended()

    def _beside_suspended(self) -> MayRun:
        """Which operations may run while a pass is suspended: of other runs, and without a custom loss.

        A run that is not in memory is restored with all that shared turns with it, which must not be those of the pass.
        """
        suspended, live = self.runs.suspended_runs, self.runs.live
        missing = [run_id for run_id in self._table.ready_runs(self._own_runs()) if run_id not in live][
            :MAX_RUNS_EXAMINED
        ]
        sharing = self._store.journal.runs_sharing_turns
        may_be_restored = {run_id for run_id in missing if not sharing([run_id]) & suspended}

        def may_run(operation: Operation) -> bool:
            run_id = operation.run_id
            return (
                operation.loss is None
                and run_id not in suspended
                and (run_id in live or run_id in may_be_restored)
            )

        return may_run

    def _without_quarantined(self, turn: Turn) -> Turn:
        """A turn without the operations whose custom loss is quarantined; they fail."""
        rejected: list[Operation] = []
        for operation in turn:
            try:
                self._crashes.check_loss(operation.loss)
            except InvalidInput as error:
                rejected += self._table.compute([operation], failed(error))
        self._loop.commit(Commit(rejected))
        return tuple(operation for operation in turn if operation not in rejected)

    # ---- completing

    def complete(self, report: Report) -> None:
        """Take the report of a job, and commit what it computed."""
        self.lane.busy = False
        if isinstance(report.error, NoFreeNode):
            self.refused = report.error.reason
        elif isinstance(report.error, WorkerLost):
            self._lose(report.error, report.job)
        else:
            self._complete(report.job, report)
        while self._deferred:
            self._deferred.popleft()()

    def _complete(self, job: Job, report: Report) -> None:
        error = report.error
        if isinstance(job, TrainingJob | DecodeJob):
            self.supervisor.record_success()
            party = TRAIN if isinstance(job, TrainingJob) else DECODE
            self._shares.charge(party, time.monotonic() - self._dispatched_at)
        match job:
            case TrainingJob(is_suspended=True):
                self._suspended, self._others_first = job, True
            case TrainingJob():
                self._complete_turns(job, report.result)
            case DecodeJob():
                if error is None:
                    ended = self.batches.complete(job, report.result)
                else:
                    ended = self.batches.fail(job, error)
                self._crashes.clear(operation.request_id for operation in ended)
                self._loop.commit(Commit(ended))
            case LoadModelsJob():
                self.supervisor.loaded(job, error)
            case ShardJob() if error is None:
                self.supervisor.record_success()
            case _ if error is not None:
                logger.error("a job of the engine failed", exc_info=error)

    def _complete_turns(self, job: TrainingJob, results: Sequence[TurnResult]) -> None:
        """Commit turns and everything that they changed."""
        commits: list[Commit] = []
        for number, (turn, result) in enumerate(zip(job.turns, results, strict=True), job.number):
            if result.error is not None:
                self._fail_turn(turn, result.error)
            self._table.compute(turn)
            for run_id, reason in result.unrecoverable.items():
                self._loop.lose_run(run_id, reason)
            commits.append(Commit(turn, number, result.changes))
        self._loop.commit(*commits)
        for turn in job.turns:
            first = turn[0]
            if first.succeeded and first.kind is Kind.UNLOAD:
                self._loop.end_run(first.run_id, RunStatus.RELEASED)
            elif not first.succeeded and first.seq_id == 0:
                self._loop.end_run(first.run_id, RunStatus.FAILED)
        self._crashes.clear([*(each.request_id for turn in job.turns for each in turn), *self.runs.live])

    def _fail_turn(self, turn: Turn, error: Exception) -> None:
        """Fail a turn as a whole; its runs are restored when they are next used."""
        if not isinstance(error, TinkexError):
            logger.error("a training turn failed unexpectedly", exc_info=error)
            error = EngineFailure(f"the engine failed: {type(error).__name__}: {error}")
        for operation in turn:
            operation.outcome, operation.ran, operation.usage = failed(error), False, {}
            self.forget_run(operation.run_id)

    # ---- losing the lane

    def _lose(self, lost: WorkerLost, job: Job | None) -> None:
        """The transition of a lost lane: what ran on it is queued again or quarantined, and what it held is forgotten.

        Nothing of it was committed, so it has not happened. Runs are restored as after a restart.
        """
        self.runs.clear()
        self.savepoints.reset()
        samples = list(self.batches.reset())
        suspended, self._suspended = self._suspended, None
        turns: Sequence[Turn] = []
        ended: list[Operation] = []
        blamed = False
        if isinstance(job, TrainingJob):
            turns = job.turns
            if lost.replaying:
                self._quarantine_runs(lost)
            elif not lost.evicting:
                done, turn, rest = turns[: job.position], turns[job.position], turns[job.position + 1 :]
                blamed = self._crashes.record_operations(turn, lost)
                retried = self._crashes.turns_to_retry(turn, lost)
                turns = [*done, *retried, *rest]
                if not retried:
                    ended += turn
        elif isinstance(job, DecodeJob):
            decoded = [each for each in samples if each.model == job.model.source]
            blamed = self._crashes.record_operations(decoded, lost)
            if len(decoded) == 1 and self._crashes.is_quarantined(decoded[0].request_id):
                ended += decoded
                samples.remove(decoded[0])
        self.supervisor.record_loss(lost, time.monotonic(), blamed=blamed)
        if suspended is not None:
            turns = [*suspended.turns, *turns]
        interrupted = {operation.run_id for turn in turns for operation in turn}
        self._placement.release(self.name, interrupted | lost.replaying)
        self._table.compute(ended, failed(quarantined(lost)))
        ended += self._table.compute([each for each in samples if each.cancelled], cancelled())
        self._table.requeue(turns, [operation for operation in samples if not operation.cancelled])
        self._crashes.clear(operation.request_id for operation in ended)
        self._loop.commit(Commit(ended))

    def _quarantine_runs(self, lost: WorkerLost) -> None:
        """Give up runs whose replay crashes the worker every time; one that was killed from outside proves nothing.

        What they did once worked, and would be lost for good: killed processes must not cost a run.
        """
        if lost.own_fault:
            self._crashes.record_crash(lost.replaying, lost)
        for run_id in lost.replaying:
            if self._crashes.is_quarantined(run_id):
                self._replay.exclude(run_id)
                self._loop.lose_run(run_id, f"the worker was lost every time it was restored ({lost.reason})")
