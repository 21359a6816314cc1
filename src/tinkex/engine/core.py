"""The engine: take accepted work → plan a batch → run it → complete the futures."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeAlias

from tinkex.engine.backend.make import make_backend
from tinkex.engine.backend.seam import Backend, WorkerDied
from tinkex.engine.config import EngineConfig
from tinkex.engine.operations.access import lost
from tinkex.engine.operations.admission import Admission
from tinkex.engine.operations.backlog import Backlog, Operation, QueueState, never_came, works_of
from tinkex.engine.operations.decoding import Decoding, cancelled
from tinkex.engine.operations.execution import Ended, Operations
from tinkex.engine.operations.feeds import Feed
from tinkex.engine.operations.figures import Figures, Gauges
from tinkex.engine.operations.health import Health
from tinkex.engine.operations.losses import CustomLosses
from tinkex.engine.operations.lost import LostRuns
from tinkex.engine.operations.maintenance import Maintenance, forget_checkpoint
from tinkex.engine.operations.metering import Metering
from tinkex.engine.operations.outcomes import failed
from tinkex.engine.operations.recall import Recall
from tinkex.engine.operations.recording import Event, Recorder
from tinkex.engine.operations.recovery import recover
from tinkex.engine.operations.replay import Replay
from tinkex.engine.operations.savepoints import SavepointKeeper
from tinkex.engine.operations.served import Base, ServedModels
from tinkex.engine.operations.suspects import Suspects, given_up
from tinkex.engine.operations.waiting import Waiters
from tinkex.engine.scheduler import FairShare, Kind, Pass, Plan, Work
from tinkex.engine.store import (
    CheckpointRow,
    FinishedRow,
    FutureRow,
    FutureStatus,
    Outcome,
    RunStatus,
    Store,
    TurnEntry,
)
from tinkex.engine.worker import Worker
from tinkex.errors import (
    EngineFailure,
    Expired,
    ModelUnavailable,
    SetupError,
    StorageUnavailable,
    TinkexError,
    UnknownObject,
)
from tinkex.types import CreateCustomLossRequest, UntypedAPIFuture

if TYPE_CHECKING:
    from tinkex.engine.model.catalog import Progress

logger = logging.getLogger("tinkex.engine")

DONE = FutureStatus.DONE
MOST_NEWS = 1000
"""How many ended samples a poller is told of at once."""
RECORD_AGAIN_S = 1.0
"""How long to wait before results that could not be recorded are tried again."""

Turn: TypeAlias = Plan[Operation] | Literal["decode"]
Submission: TypeAlias = Operation | CreateCustomLossRequest
Outcomes: TypeAlias = Sequence[tuple[str, Outcome]]


class Engine:
    """Trains and samples for any number of users; owns one data directory and one thread for all computation.

    Example:
        >>> engine = Engine(EngineConfig(models={"tiny": "/models/tiny"}))
        >>> engine.start()
        >>> submitted = engine.submit("local", CreateModelRequest(session_id=..., base_model="tiny", ...))
        >>> outcome = await engine.wait("local", submitted.request_id, timeout=30)
        >>> engine.close()
    """

    def __init__(
        self, config: EngineConfig, progress: Progress | None = None, backend: Backend | None = None
    ) -> None:
        self.config = config
        self.store = Store(config.engine_dir)
        self.api_key = self.store.local_key(time.time())
        self._worker = Worker(self.step, self._patience)
        self.health = Health()
        silence = partial(self.health.note, "silence")
        self.backend = backend or make_backend(config, progress, self._worker.wake, silence)
        self.models = ServedModels(config, self.backend, progress)
        self._backlog = Backlog(
            gap_timeout_s=config.gap_timeout_s,
            max_pending=config.max_pending_operations,
            max_tokens_per_s=config.max_tokens_per_s_per_user,
            on_work=self._worker.wake,
        )
        self._recorder = Recorder(self.store, self.health)
        self._metering = Metering(self.store)
        losses = CustomLosses(self.store)
        self._operations = Operations(config, self.store, self.models, self.backend, losses)
        self._keeper = SavepointKeeper(config, self.store, self.backend, self._operations.live, self.health)
        self._replay = Replay(self.store, self._operations, self._keeper)
        self.admission = Admission(config, self.store, self.models, self._backlog, self.health, losses)
        self._suspects = Suspects()
        self._decoding = Decoding(
            self.backend,
            self.models,
            self._backlog,
            self.admission,
            config.max_decode_batch,
            self._metering,
            self._suspects,
        )
        self._recall = Recall(self.backend, self.models, self.health)
        self._lost_runs = LostRuns(config, self.store, self.health)
        self._maintenance = Maintenance(
            config, self.store, self.backend, self._release, self._lost_runs, self.admission.intact
        )
        self._waiters = Waiters()
        self._turns = FairShare[str]()
        self._under_way: Turn | None = None
        self._reviving = False
        self._again: deque[Plan[Operation]] = deque()
        self._closed = False
        self._gauges = Gauges(
            config,
            self.store,
            self.backend,
            self.models,
            self._backlog,
            self._decoding,
            self._metering,
            self._operations.live,
            self.health,
            self._waiters,
        )

    # ---- the loop, on the engine thread

    def step(self) -> bool:
        """One turn: take → run → complete; says whether there was anything to do."""
        try:
            turn = self._take()
            if turn is None:
                return False
            self._under_way = turn
            if turn == "decode":
                self._complete(Event(self._decode()))
            else:
                self._complete_turn(self._run(turn))
            self._recall.worked()
        except WorkerDied as death:
            self._worker_died(death)
        finally:
            self._under_way = None
        return True

    def _take(self) -> Turn | None:
        """What runs next; training and sampling share the time equally while both want it."""
        now = time.monotonic()
        self._tell(self._recorder.catch_up())
        if self._recorder.behind:
            return None
        self._maintenance.run_if_due(now)
        missed = self._backlog.give_up_gaps(now)
        self._drop([m.work for m in missed], [failed(never_came(m)) for m in missed])
        self._decoding.drop_cancelled()
        if not self._recall.worker_is_there(now):
            return None
        if self._again:
            return self._again.popleft()
        wanting = ["train"] * self._backlog.has_training() + ["decode"] * self._decoding.wanted()
        if not wanting:
            return None
        self._turns.waiting(wanting)
        if self._turns.pick(wanting) == "decode":
            return "decode"
        return self._backlog.next_plan(self.config.max_tokens_per_pass)

    def _run(self, plan: Plan[Operation]) -> Sequence[Ended]:
        """Run training operations; whatever goes wrong becomes their outcome."""
        works = works_of(plan)
        self._reviving = False
        started = time.monotonic()
        try:
            self._revive(works)
            began = time.monotonic()
            if isinstance(plan, Pass):
                ended = self._operations.run_pass(works)
            else:
                ended = [self._operations.run_alone(plan.work)]
            trained = any(work.kind.trains for work in works)
            self._keeper.worked({work.run_id for work in works}, time.monotonic() - began if trained else 0.0)
        except WorkerDied:
            raise
        except TinkexError as error:
            return [Ended(work, failed(error), ran=False) for work in works]
        except Exception as error:
            logger.exception("an operation failed in a way it should not")
            self._operations.take_effects()
            failure = failed(EngineFailure(f"the engine failed: {type(error).__name__}: {error}"))
            return [Ended(work, failure, ran=False) for work in works]
        else:
            return ended
        finally:
            self._turns.charge("train", time.monotonic() - started)

    def _decode(self) -> Outcomes:
        started = time.monotonic()
        try:
            return self._decoding.step()
        except WorkerDied:
            raise
        except Exception:
            logger.exception("a step of sampling failed in a way it should not")
            return []
        finally:
            self._turns.charge("decode", time.monotonic() - started)

    def _revive(self, works: Sequence[Work[Operation]]) -> None:
        """Bring runs back that an earlier engine left; those that are damaged end here."""
        for work in works:
            if work.seq_id > 0 and work.run_id not in self._operations.live:
                self._reviving = True
                damaged = self._replay.revive(work.run_id)
                self._reviving = False
                self._suspects.cleared(self._operations.live)
                for run_id, reason in damaged.items():
                    self._lose_run(run_id, reason)

    def _complete_turn(self, ended: Sequence[Ended]) -> None:
        """Record a turn and everything that came of it, then make savepoints if they are due."""
        self._recorder.turn += 1
        turn = self._recorder.turn
        effects = [*self._operations.take_effects()]
        self._metering.trained(ended)
        entries = [
            TurnEntry(turn, place, e.work.run_id, e.work.seq_id, e.work.request_id, e.outcome.status is DONE)
            for place, e in enumerate(ended)
            if e.ran
        ]
        first = ended[0]
        if first.work.kind is Kind.LOAD and first.outcome.status is DONE:
            # The checkpoint may be deleted or replaced before a replay would read it again.
            effects += filter(None, [self._keeper.save_now(first.work.run_id, turn)])
        outcomes = [(e.work.request_id, e.outcome) for e in ended]
        self._complete(Event(outcomes, entries, [e.work.request_id for e in ended if not e.ran], effects))
        self._under_way = None
        self._suspects.cleared(request_id for request_id, _ in outcomes)
        if first.outcome.status is DONE and first.work.kind is Kind.UNLOAD:
            self._release(first.work.run_id)
        elif first.outcome.status is not DONE and first.work.seq_id == 0:
            self._operations.forget(first.work.run_id)
            self._end_run(first.work.run_id, RunStatus.FAILED)
        if not self._recorder.behind:
            self._keeper.save_if_due(turn)

    def _worker_died(self, death: WorkerDied) -> None:
        """Forget what was in the memory of the worker, and have everything that was under way run again, once it is back.

        Nothing of that was recorded, so it has not happened. Runs come back as after a restart.
        """
        turn, reviving = self._under_way, self._reviving
        self._recall.died(death, time.monotonic())
        self._operations.worker_died()
        self._keeper.worker_died()
        self._complete(Event(self._decoding.worker_died(death, decoding=turn == "decode")))
        if turn is None or turn == "decode":
            return
        if reviving and self._replay.under_way:
            self._again.appendleft(turn)  # operations of a run that is lost say so when their turn comes
            for run_id in self._suspects.judge_replay(self._replay.under_way, death):
                self._replay.leave_out(run_id)
                self._lose_run(run_id, f"the worker died every time it was brought back ({death.reason})")
            return
        again = self._suspects.judge(turn, death)
        self._again.extendleft(reversed(again))
        if not again:
            (work,) = works_of(turn)
            self._complete_turn([Ended(work, failed(given_up(death)), ran=False)])

    def _complete(self, event: Event) -> None:
        """Record what happened in one commit, and wake those who wait for it."""
        if event.outcomes:
            self._backlog.spans.ended(event.outcomes)
            timings = self._backlog.timings(request_id for request_id, _ in event.outcomes)
            effects = [*event.effects, *self._metering.take()]
            self._tell(self._recorder.record(replace(event, effects=effects, timings=timings)))

    def _tell(self, outcomes: Outcomes) -> None:
        if outcomes:
            ended = self._backlog.finished(request_id for request_id, _ in outcomes)
            self._waiters.wake(outcomes)
            self._waiters.nudge({work.run_id for work in ended if work.kind is Kind.SAMPLE})

    def _drop(self, works: Sequence[Work[Operation]], outcomes: Sequence[Outcome]) -> None:
        ids = [work.request_id for work in works]
        self._complete(Event(list(zip(ids, outcomes, strict=True)), never_ran=ids))

    def _release(self, run_id: str) -> None:
        self._operations.forget(run_id)
        self._end_run(run_id, RunStatus.RELEASED)

    def _end_run(self, run_id: str, status: RunStatus) -> None:
        left = self.admission.close_run(run_id, status)
        self._drop(left, [failed(lost(self.store, run_id))] * len(left))

    def _lose_run(self, run_id: str, reason: str) -> None:
        self._end_run(run_id, RunStatus.CORRUPTED)
        self._lost_runs.add(run_id, reason)

    def _patience(self) -> float:
        if self._recorder.behind:
            return RECORD_AGAIN_S
        deadlines = [self._maintenance.due, self._backlog.next_gap_deadline(), self._recall.due]
        return max(0.0, min(due for due in deadlines if due is not None) - time.monotonic())

    # ---- life

    def start(self) -> None:
        """Pick up what an earlier engine left, and begin to work."""
        recover(self.store, self.admission, self._lost_runs)
        self._recall.start()
        self._worker.start()

    def load_models(self) -> Future[None]:
        """Bring every served model into memory now instead of at its first use."""
        loading = self._recall.load_all()
        self._worker.wake()
        return loading

    def end_waits(self) -> None:
        """Let everybody who waits for a result go without one; they will ask again."""
        self._waiters.end_all()

    @property
    def closed(self) -> bool:
        """Whether the engine has been closed, and answers nobody any more."""
        return self._closed

    def close(self) -> None:
        """Finish the operation under way, let every caller go, and close the store."""
        if not self._closed:
            self._closed = True
            self._worker.stop()
            self._recall.stop()
            self._recorder.catch_up()
            self._waiters.end_all()
            self._backlog.spans.abandon()
            self._keeper.close()
            self.backend.close()
            self._maintenance.close()
            self.store.close()

    # ---- for callers, on any thread

    def submit(self, owner: str, request: Submission, body: bytes | None = None) -> UntypedAPIFuture:
        """Accept an operation: it is recorded, and will have an outcome. Raises the reason if it is refused."""
        if isinstance(request, CreateCustomLossRequest):
            self._check_loss(request)
        accepted = self.admission.submit(owner, request, body)
        with self._promising():
            self.store.database.flushed().result()
        return accepted

    async def flushed(self) -> None:
        """Wait until everything recorded so far would survive a power failure."""
        with self._promising():
            await asyncio.wrap_future(self.store.database.flushed())

    async def accept(self, owner: str, request: Submission, body: bytes | None = None) -> UntypedAPIFuture:
        """The same for an event loop: operations that are submitted at the same time share one flush to disk."""
        if isinstance(request, CreateCustomLossRequest):
            await asyncio.to_thread(self._check_loss, request)
        accepted = self.admission.submit(owner, request, body)
        await self.flushed()
        return accepted

    def _check_loss(self, request: CreateCustomLossRequest) -> None:
        """Refuse a loss that cannot be run; whoever runs it says so."""
        try:
            self.backend.check_loss(request)
        except WorkerDied as death:
            raise ModelUnavailable(
                f"the worker that would check this loss is gone ({death.reason}) and will be back; send it again."
            ) from death

    @contextlib.contextmanager
    def _promising(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.health.trouble("disk", f"the disk does not take what is written ({error})")
            raise StorageUnavailable(
                f"the disk of the server failed ({error}), so it cannot promise anything; restart the server on a sound disk."
            ) from error

    async def ready(self, base: Base) -> None:
        """Wait a while until a model is in memory, because only then can what is asked of it be checked."""

        def load() -> None:
            # If it cannot be loaded, the operation that needs it will say so; here it only cannot be checked.
            with contextlib.suppress(SetupError, WorkerDied):
                base.load()

        if not base.loaded:
            await asyncio.wait(
                [asyncio.wrap_future(self._worker.call(load))], timeout=self.config.long_poll_s
            )

    async def wait(self, owner: str, request_id: str, timeout: float) -> Outcome | None:
        """The outcome of an operation as soon as it is there, or None when the time is over."""
        waiter = self._waiters.enter(request_id)
        try:
            _, outcome = self._look(owner, request_id)
            if outcome is None:
                try:
                    outcome = await asyncio.wait_for(waiter, timeout)
                except TimeoutError:
                    return None
            if outcome is not None:
                self._maintenance.fetched(request_id)
            return outcome
        finally:
            self._waiters.leave(request_id, waiter)

    async def wait_any(
        self, sampler_id: str, client: int, after: int, timeout: float
    ) -> Sequence[FinishedRow]:
        """What ended of one client of a sampler since ``after``; waits for something to, until the time is over."""
        deadline = time.monotonic() + timeout
        while True:
            waiter = self._waiters.enter(sampler_id)
            try:
                found = self.store.finished.after(sampler_id, client, after, MOST_NEWS)
                left = deadline - time.monotonic()
                if found or left <= 0 or waiter.done():
                    return found
                # Something of another client may wake this one: then it waits on.
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(asyncio.shield(waiter), left)
            finally:
                self._waiters.leave(sampler_id, waiter)

    def watch(self, request_id: str, feed: Feed) -> None:
        """Report the tokens of a sample to a feed as they are drawn, those it has already first."""
        self._worker.call(lambda: self._decoding.watch(request_id, feed))

    def unwatch(self, request_id: str) -> None:
        """End what :meth:`watch` began."""
        self._worker.call(lambda: self._decoding.unwatch(request_id))

    def queue_state(self, request_id: str) -> QueueState:
        """Why an operation has no outcome yet."""
        worker = self.backend.status
        if worker is not None and worker.hindrance is not None:
            return QueueState("paused_capacity", worker.hindrance)
        return self._backlog.describe(request_id)

    def figures(self) -> Figures:
        """What the engine does and holds at the moment, for whoever watches it."""
        return self._gauges.read()

    def cancel(self, owner: str, request_id: str) -> None:
        """Give up a sample; other operations are not cancelled, because those after them build on them."""
        self._find(owner, request_id)
        if self._backlog.cancel(request_id):
            self._worker.call(lambda: self._complete(Event([(request_id, cancelled())])))

    def delete_checkpoint(self, checkpoint: CheckpointRow) -> None:
        """Forget a checkpoint now, and remove its files as soon as the engine is between two operations."""
        forget_checkpoint(self.store, checkpoint)
        self._worker.call(lambda: self._maintenance.remove(checkpoint.directory))

    def _find(self, owner: str, request_id: str) -> FutureRow:
        return self._look(owner, request_id)[0]

    def _look(self, owner: str, request_id: str) -> tuple[FutureRow, Outcome | None]:
        found = self.store.futures.look(request_id)
        if found is None or found[0].owner != owner:
            raise UnknownObject(
                f"there is no request {request_id!r} of yours; it may be long gone. Submit it again."
            )
        if found[0].status is FutureStatus.EXPIRED:
            raise Expired(
                f"the result of request {request_id} was kept for a while and is gone; submit it again."
            )
        return found
