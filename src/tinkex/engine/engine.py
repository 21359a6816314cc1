"""The engine: trains and samples for any number of users. This is the face for callers on any thread."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from tinkex.engine.config import EngineConfig
from tinkex.engine.durability.recovery import recover
from tinkex.engine.durability.retention import forget_checkpoint
from tinkex.engine.encoding import body_size
from tinkex.engine.health import Health
from tinkex.engine.intake.admission import Admission, Arrival, Submission
from tinkex.engine.intake.arrivals import Arrivals
from tinkex.engine.intake.uploads import WeightUploads
from tinkex.engine.integrity import CheckpointIntegrity
from tinkex.engine.lanes.factory import LaneBackends
from tinkex.engine.lanes.interface import Backend, BatchStats, WorkerLost, WorkerStatus
from tinkex.engine.lanes.lane import Inbox
from tinkex.engine.lanes.roles import LaneSpec, lane_specs, num_lanes
from tinkex.engine.loop import EngineLoop
from tinkex.engine.operation import Kind
from tinkex.engine.running import spans
from tinkex.engine.running.budgets import Budgets
from tinkex.engine.running.crashes import CrashTracker
from tinkex.engine.running.feeds import TokenFeed
from tinkex.engine.running.table import OperationTable, QueueState
from tinkex.engine.running.waiters import set_outcome
from tinkex.engine.sampler_pool import SamplerCounts
from tinkex.engine.served_models import ServedModel, ServedModels
from tinkex.engine.store import CheckpointRow, FinishedRow, FutureRow, FutureStatus, Outcome, Store, UsageKind
from tinkex.engine.user_threads import UserThreads
from tinkex.errors import Expired, ModelUnavailable, StorageUnavailable, UnknownObject
from tinkex.types import CreateCustomLossRequest, SampleRequest, StructuredOutput, UntypedAPIFuture

if TYPE_CHECKING:
    from tinkex.engine.model.catalog import Progress

T = TypeVar("T")

MAX_LOOP_BYTES = 64 * 1024
"""The size of a request that is validated and recorded, or of a result that is read, on the event loop, in a few milliseconds."""
THREADS = 4
"""Threads for what users ask for that takes long: searches, copies, large results, grammars; one of each user at a time."""
MAX_COMPLETIONS = 1000
"""How many ended samples one poll returns."""


@dataclass(frozen=True)
class ModelStats:
    """One base model: what computes its samples (empty until it is loaded), and its decode batch."""

    name: str
    compute: str
    batch: BatchStats


@dataclass(frozen=True)
class LaneStats:
    """One lane: whether it computes at the moment, and its worker process, or None if the engine's own process computes."""

    name: str
    is_busy: bool
    worker: WorkerStatus | None


@dataclass(frozen=True)
class EngineStats:
    """What the engine does and holds at the moment, in numbers."""

    state: str
    troubles: Collection[str]
    uptime_s: float
    operations: Mapping[tuple[Kind, bool], int]
    """Operations by kind, and whether they run."""
    models: Collection[ModelStats]
    kv_limit_bytes: int
    used: Mapping[UsageKind, int]
    """Tokens and checkpoints since the start."""
    live_runs: int
    """Runs in memory."""
    live_bytes: int
    """The memory of their weights, gradients and moments."""
    live_limit_bytes: int
    evictions: int
    """Runs evicted to disk since the start."""
    polls: int
    journal_rows: int
    savepoints: int
    stored_bytes: Mapping[str, int]
    """What users store, by kind, as the disk quotas count it."""
    database_bytes: int
    free_disk_bytes: int
    lanes: Sequence[LaneStats]
    samplers: SamplerCounts | None = None
    """How many samplers there are, if their number follows the load."""


class Engine:
    """Trains and samples for any number of users; owns one data directory. Safe to use from any thread.

    ``backends`` are those of its lanes, and then of the samplers that are added; without them the configuration decides.

    Example:
        >>> engine = Engine(EngineConfig(models={"tiny": "/models/tiny"}))
        >>> engine.start()
        >>> submitted = engine.submit("local", CreateModelRequest(session_id=..., base_model="tiny", ...))
        >>> outcome = await engine.wait("local", submitted.request_id, timeout=30)
        >>> engine.close()
    """

    def __init__(
        self,
        config: EngineConfig,
        progress: Progress | None = None,
        backends: Sequence[Backend] | None = None,
    ) -> None:
        self.config = config
        self.store = Store(config.engine_dir)
        self.api_key = self.store.local_key(time.time())
        self.health = Health()
        self._inbox = inbox = Inbox()
        self._backends = LaneBackends(config, progress, inbox.wake, self.health.note)
        given = iter(backends or ())

        def make(spec: LaneSpec) -> Backend:
            return self._backends.make(spec) if backends is None else next(given)

        made = {spec: make(spec) for spec in lane_specs(config)}
        self.backend = next(iter(made.values()))
        """The backend of the first lane."""
        self.models = ServedModels(config, progress)
        self._table = OperationTable(
            gap_timeout_s=config.gap_timeout_s,
            budgets=Budgets(
                max_operations=config.max_pending_operations,
                max_bytes_per_user=config.max_pending_bytes_per_user,
                max_bytes=config.max_pending_bytes,
                reserve_bytes=config.max_body_bytes,
                max_held_bytes=config.max_pending_bytes_in_memory,
                max_tokens_per_s=config.max_tokens_per_s_per_user,
            ),
            on_ready=inbox.wake,
        )
        self.integrity = CheckpointIntegrity(self.store, self.health)
        crashes = CrashTracker(records=self.store.crashes)
        self.admission = Admission(
            config, self.store, self.models, self._table, crashes, self.health, self.integrity
        )
        self.uploads = WeightUploads(config, self.store, self.models, self.backend)
        self._arrivals = Arrivals(self.admission)
        self._loop = EngineLoop(
            config,
            self.store,
            self.health,
            self.models,
            self._table,
            crashes,
            self.integrity,
            inbox,
            made,
            make,
        )
        self._intake = ThreadPoolExecutor(1, thread_name_prefix="tinkex-intake")
        self._threads = UserThreads(THREADS, "tinkex-user")
        self._num_submitting = 0
        self._started_at = time.monotonic()
        self._closed = False

    # ---- lifecycle

    def start(self) -> None:
        """Recover what an earlier engine left, and start to work."""
        recover(self.store, self.models, self._table, self.integrity, self._loop.unrecoverable)
        self._loop.start()

    def load_models(self) -> Future[None]:
        """Load every served model now instead of at its first use."""
        return self._loop.load_models()

    def end_waits(self) -> None:
        """End every wait for a result without one; clients poll again."""
        self._loop.waiters.end_all()

    async def pause(self, seconds: float) -> bool:
        """Wait, unless all waits end; returns whether the time has passed."""
        waiters = self._loop.waiters
        waiter = waiters.enter("")
        try:
            done, _ = await asyncio.wait([waiter], timeout=seconds)
            return not done
        finally:
            waiters.leave("", waiter)

    @property
    def closed(self) -> bool:
        """Whether the engine has been closed."""
        return self._closed

    def close(self) -> None:
        """Finish the running job, end all waits, and close the store."""
        if not self._closed:
            self._closed = True
            self._intake.shutdown()
            self._threads.shutdown()
            self._loop.stop()
            self._loop.waiters.end_all()
            spans.abandoned(self._table.unfinished())
            for each in self._loop.lanes.values():
                each.lane.backend.close()
            self._backends.close()
            self.models.close()
            self._loop.retention.close()
            self.store.close()

    # ---- submitting

    def submit(self, owner: str, request: Submission, body: bytes | None = None) -> UntypedAPIFuture:
        """Accept an operation: it is recorded, and will have an outcome. Raises the reason if it is rejected."""
        if isinstance(request, CreateCustomLossRequest):
            self._check_loss(request)
        accepted = self.admission.submit(owner, request, body)
        try:
            self.store.database.flushed().result()
        except OSError as error:
            raise self._disk_failed(error) from error
        return accepted

    async def accept(self, owner: str, request: Submission, body: bytes | None = None) -> UntypedAPIFuture:
        """The same for an event loop: operations that are submitted at the same time share one transaction and one flush to disk."""
        if isinstance(request, CreateCustomLossRequest):
            await self.run_on_thread(owner, partial(self._check_loss, request))
        if isinstance(request, SampleRequest) and request.sampling_params.structured_output is not None:
            await self._compile(owner, request, request.sampling_params.structured_output)
        if self._num_submitting or body is None or body_size(body) > MAX_LOOP_BYTES:
            accepted = await self._submit_on_thread(owner, request, body)
        elif spans.call_context.get() is not None:  # of a traced request, which a group would lose
            accepted = self.admission.submit(owner, request, body)
        else:
            accepted = await self._arrivals.submit(Arrival(owner, request, body))
        await self.flushed()
        return accepted

    async def _submit_on_thread(
        self, owner: str, request: Submission, body: bytes | None
    ) -> UntypedAPIFuture:
        """Validate and record a large request while the event loop serves others.

        Until that is done small ones follow it there: on the loop they would wait for the lock of the intake.
        """
        if self._closed:
            raise ModelUnavailable("this engine is closed; start it again.")
        context = copy_context()

        def submit() -> UntypedAPIFuture:
            return context.run(self.admission.submit, owner, request, body)

        self._num_submitting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._intake, submit)
        finally:
            self._num_submitting -= 1

    async def _compile(self, owner: str, request: SampleRequest, wanted: StructuredOutput) -> None:
        """Compile a structured output on a thread of its own, so that admission finds it compiled; raises what is wrong with it."""
        model = self.models.find(self.admission.find_sampler(owner, request).base_model)
        if model.known and not model.has_compiled(wanted):
            await self.run_on_thread(owner, lambda: model.grammars.check(wanted))

    async def run_on_thread(self, owner: str, job: Callable[[], T]) -> T:
        """Run what takes long for a user while the event loop serves others; the jobs of one user run one after the other."""
        return await asyncio.wrap_future(self._threads.submit(owner, job))

    async def flushed(self) -> None:
        """Wait until everything recorded so far would survive a power failure."""
        try:
            await self.store.database.wait_flushed()
        except OSError as error:
            raise self._disk_failed(error) from error

    def _check_loss(self, request: CreateCustomLossRequest) -> None:
        """Raise ``InvalidInput`` for a loss that cannot be run."""
        try:
            self.backend.check_loss(request)
        except WorkerLost as lost:
            raise ModelUnavailable(
                f"the worker that would check this loss is being started again ({lost.reason}); send it again."
            ) from lost

    def _disk_failed(self, error: OSError) -> StorageUnavailable:
        self.health.trouble("disk", f"the disk does not accept writes ({error})")
        return StorageUnavailable(
            f"the disk of the server failed ({error}), so nothing can be accepted; restart the server on a working disk."
        )

    async def load(self, model: ServedModel) -> None:
        """Wait until a model is loaded, for one long poll at most: only then can requests be validated."""

        def load() -> None:
            # If it cannot be loaded, the operation that needs it fails with the reason.
            with contextlib.suppress(ModelUnavailable, WorkerLost):
                model.load_on(self.backend)

        if not model.known:
            first = next(iter(self._loop.lanes.values()))
            loading = asyncio.wrap_future(first.lane.call(load))
            await asyncio.wait([loading], timeout=self.config.long_poll_s)

    # ---- results

    async def wait(self, owner: str, request_id: str, timeout: float) -> Outcome | None:
        """The outcome of an operation as soon as it is committed, or None when the time is over."""
        waiters = self._loop.waiters
        waiter = waiters.enter(request_id)
        try:
            # The store is read only for operations that have ended: the waiter gets the outcome of every other.
            outcome = None if self._table.has(owner, request_id) else await self._read(owner, request_id)
            if outcome is None:
                timer = asyncio.get_running_loop().call_later(timeout, set_outcome, waiter, None)
                try:
                    outcome = await waiter
                finally:
                    timer.cancel()
            if outcome is not None:
                self._loop.retention.fetched(request_id)
            return outcome
        finally:
            waiters.leave(request_id, waiter)

    async def wait_any(
        self, sampler_id: str, client: int, after: int, timeout: float
    ) -> Sequence[FinishedRow]:
        """What ended of one client of a sampler since ``after``; waits for something to, until the time is over."""
        waiters = self._loop.waiters
        deadline = time.monotonic() + timeout
        while True:
            waiter = waiters.enter(sampler_id)
            try:
                found = self.store.finished.after(sampler_id, client, after, MAX_COMPLETIONS)
                left = deadline - time.monotonic()
                if found or left <= 0 or waiter.done():
                    return found
                # A sample of another client may wake this one: then it waits again.
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(asyncio.shield(waiter), left)
            finally:
                waiters.leave(sampler_id, waiter)

    def watch(self, request_id: str, feed: TokenFeed) -> None:
        """Append the tokens of a sample to a feed as they are drawn, those it already has first."""
        self._inbox.put(lambda: self._loop.feeds.watch(request_id, feed))

    def unwatch(self, request_id: str) -> None:
        """End what :meth:`watch` started."""
        self._inbox.put(lambda: self._loop.feeds.unwatch(request_id))

    def queue_state(self, request_id: str) -> QueueState:
        """Why an operation has no outcome yet."""
        trouble = self._loop.queue_trouble(self._table.find(request_id))
        if trouble is not None:
            return QueueState("paused_capacity", trouble)
        return self._table.describe(request_id)

    def cancel(self, owner: str, request_id: str) -> None:
        """Cancel a sample; other operations are not cancelled, because later ones depend on them."""
        self._find(owner, request_id, 0)
        operation = self._table.cancel(request_id)
        if operation is not None:
            self._inbox.put(lambda: self._loop.cancel(operation))

    async def _read(self, owner: str, request_id: str) -> Outcome | None:
        """The outcome of a user's request, or None if it has not ended; a large one is read on a thread."""
        future, outcome = self._find(owner, request_id, MAX_LOOP_BYTES)
        if outcome is None and future.status is not FutureStatus.PENDING:
            _, outcome = await self.run_on_thread(owner, partial(self._find, owner, request_id))
        return outcome

    def _find(
        self, owner: str, request_id: str, max_bytes: int = sys.maxsize
    ) -> tuple[FutureRow, Outcome | None]:
        """A user's request, and its outcome if it has ended and is not larger; raises if there is none."""
        found = self.store.futures.find_with_outcome(request_id, max_bytes)
        if found is None or found[0].owner != owner:
            raise UnknownObject(
                f"there is no request {request_id!r} of yours; it may be long gone. Submit it again."
            )
        if found[0].status is FutureStatus.EXPIRED:
            raise Expired(
                f"the result of request {request_id} is gone: it was fetched, or its retention time has passed; submit it again."
            )
        return found

    # ---- operation

    def stats(self) -> EngineStats:
        """What the engine does and holds at the moment."""
        store = self.store
        database = store.database.path
        files = [database, database.with_name(f"{database.name}-wal")]
        live_runs, live_bytes = self._loop.live_runs
        return EngineStats(
            state=self.health.state,
            troubles=self.health.troubles,
            uptime_s=time.monotonic() - self._started_at,
            operations=self._table.depths(),
            models=self._model_stats(),
            kv_limit_bytes=self.config.kv_cache_bytes,
            used=self._loop.committer.usage_totals,
            live_runs=live_runs,
            live_bytes=live_bytes,
            live_limit_bytes=self.config.live_bytes_limit,
            evictions=sum(each.eviction.num_evicted for each in self._loop.lanes.values()),
            polls=len(self._loop.waiters),
            journal_rows=len(store.journal),
            savepoints=len(store.savepoints.all()),
            stored_bytes=store.disk_usage.by_kind(),
            database_bytes=sum(file.stat().st_size for file in files if file.exists()),
            free_disk_bytes=shutil.disk_usage(store.root).free,
            lanes=[
                LaneStats(each.name, each.lane.busy, each.lane.backend.status)
                for each in self._loop.lanes.values()
            ],
            samplers=self.samplers,
        )

    @property
    def has_several_lanes(self) -> bool:
        """Whether there are, or may be, several lanes."""
        return num_lanes(self.config) > 1

    @property
    def samplers(self) -> SamplerCounts | None:
        """How many samplers there are, or None if their number is fixed."""
        return self._loop.sampler_counts

    @property
    def workers(self) -> Mapping[str, WorkerStatus | None]:
        """The worker process of each lane; None where the engine's own process computes."""
        return {each.name: each.lane.backend.status for each in self._loop.lanes.values()}

    def _model_stats(self) -> Sequence[ModelStats]:
        found: dict[str, ModelStats] = {}
        for name in self.models.names:
            model = self.models.find(name)
            compute = model.info.computes_with if model.known else ""
            batches = [each.batches.stats.get(model.source) for each in self._loop.lanes.values()]
            found.setdefault(model.source, ModelStats(name, compute, BatchStats.total(batches)))
        return list(found.values())

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """A block during which operations are accepted and queued, and none is started.

        Example:
            >>> with engine.paused():
            ...     ids = [engine.submit("local", request).request_id for request in requests]
        """
        return self._loop.paused()

    def run_retention(self) -> None:
        """Remove everything whose retention time has passed, now instead of at the next interval."""
        with self._quiescent():
            self._inbox.call(self._loop.retention.run).result()
            self._drain_lanes()  # they remove files

    def flush_savepoints(self) -> None:
        """Write the savepoints that are due, and wait until all are complete."""
        with self._quiescent():
            for each in self._loop.lanes.values():
                each.lane.call(partial(each.savepoints.flush, self._loop.committer.turn)).result()

    @contextlib.contextmanager
    def _quiescent(self) -> Iterator[None]:
        """Nothing runs during the block, and everything that ran is committed."""
        with self._loop.paused():
            self._drain_lanes()
            self._inbox.call(lambda: None).result()
            yield

    def _drain_lanes(self) -> None:
        """Wait until the lanes have done what was requested of them, one after the other."""
        for each in self._loop.lanes.values():
            each.lane.call(lambda: None).result()

    def delete_checkpoint(self, checkpoint: CheckpointRow) -> None:
        """Delete a checkpoint now, and its files as soon as no job uses them."""
        forget_checkpoint(self.store, checkpoint)
        self._loop.remove_weights(checkpoint.directory)
