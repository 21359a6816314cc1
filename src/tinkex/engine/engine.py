"""The engine: trains and samples for any number of users. This is the face for callers on any thread."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from tinkex.engine.config import EngineConfig
from tinkex.engine.durability.recovery import Recovery
from tinkex.engine.durability.retention import forget_checkpoint
from tinkex.engine.health import Health
from tinkex.engine.inbox import Inbox
from tinkex.engine.intake.admission import Admission
from tinkex.engine.integrity import CheckpointIntegrity
from tinkex.engine.lanes.interface import Backend, BatchStats, WorkerLost
from tinkex.engine.lanes.lane import Lane
from tinkex.engine.loop import EngineLoop
from tinkex.engine.operation import OperationRequest
from tinkex.engine.running import spans
from tinkex.engine.running.feeds import TokenFeed
from tinkex.engine.running.table import OperationTable, QueueState
from tinkex.engine.served_models import ServedModel, ServedModels
from tinkex.engine.stats import EngineStats, ModelStats
from tinkex.engine.store import CheckpointRow, FinishedRow, FutureRow, FutureStatus, Outcome, Store
from tinkex.errors import Expired, ModelUnavailable, StorageUnavailable, UnknownObject
from tinkex.types import CreateCustomLossRequest, UntypedAPIFuture

if TYPE_CHECKING:
    from tinkex.engine.model.catalog import Progress

MAX_COMPLETIONS = 1000
"""How many ended samples one poll returns."""

Submission: TypeAlias = OperationRequest | CreateCustomLossRequest


class Engine:
    """Trains and samples for any number of users; owns one data directory. Safe to use from any thread.

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
        self.health = Health()
        self._inbox = inbox = Inbox()
        self.backend = backend or self._make_backend(progress)
        self._lane = Lane("lane-0", self.backend, inbox.put)
        self.models = ServedModels(config, progress)
        self._table = OperationTable(
            gap_timeout_s=config.gap_timeout_s,
            max_pending=config.max_pending_operations,
            max_tokens_per_s=config.max_tokens_per_s_per_user,
            on_ready=inbox.wake,
        )
        self.integrity = CheckpointIntegrity(self.store, self.health)
        self.admission = Admission(config, self.store, self.models, self._table, self.health, self.integrity)
        self._loop = EngineLoop(
            config, self.store, self.health, self.models, self._table, self.integrity, inbox, self._lane
        )
        self._started_at = time.monotonic()
        self._closed = False

    def _make_backend(self, progress: Progress | None) -> Backend:
        """The backend that the configuration names; the other one need not be importable."""
        if self.config.worker == "process":
            from tinkex.engine.lanes.worker_process import ProcessBackend

            on_silence = partial(self.health.note, "silence")
            return ProcessBackend(self.config, progress, self._inbox.wake, on_silence)
        from tinkex.engine.lanes.in_process import LocalBackend

        return LocalBackend(self.config, progress)

    # ---- lifecycle

    def start(self) -> None:
        """Recover what an earlier engine left, and start to work."""
        Recovery(self.store, self.models, self._table, self.integrity, self._loop.unrecoverable).recover()
        self._loop.start()

    def load_models(self) -> Future[None]:
        """Load every served model now instead of at its first use."""
        loading = self._loop.supervisor.load_models()
        self._inbox.wake()
        return loading

    def end_waits(self) -> None:
        """End every wait for a result without one; clients poll again."""
        self._loop.waiters.end_all()

    @property
    def closed(self) -> bool:
        """Whether the engine has been closed."""
        return self._closed

    def close(self) -> None:
        """Finish the running job, end all waits, and close the store."""
        if not self._closed:
            self._closed = True
            self._loop.stop()
            self._loop.waiters.end_all()
            spans.abandoned(self._table.unfinished())
            self.backend.close()
            self._loop.retention.close()
            self.store.close()

    # ---- submitting

    def submit(self, owner: str, request: Submission, body: bytes | None = None) -> UntypedAPIFuture:
        """Accept an operation: it is recorded, and will have an outcome. Raises the reason if it is rejected."""
        if isinstance(request, CreateCustomLossRequest):
            self._check_loss(request)
        accepted = self.admission.submit(owner, request, body)
        with self._flushing():
            self.store.database.flushed().result()
        return accepted

    async def accept(self, owner: str, request: Submission, body: bytes | None = None) -> UntypedAPIFuture:
        """The same for an event loop: operations that are submitted at the same time share one flush to disk."""
        if isinstance(request, CreateCustomLossRequest):
            await asyncio.to_thread(self._check_loss, request)
        accepted = self.admission.submit(owner, request, body)
        await self.flushed()
        return accepted

    async def flushed(self) -> None:
        """Wait until everything recorded so far would survive a power failure."""
        with self._flushing():
            await asyncio.wrap_future(self.store.database.flushed())

    def _check_loss(self, request: CreateCustomLossRequest) -> None:
        """Raise ``InvalidInput`` for a loss that cannot be run."""
        try:
            self.backend.check_loss(request)
        except WorkerLost as lost:
            raise ModelUnavailable(
                f"the worker that would check this loss is being started again ({lost.reason}); send it again."
            ) from lost

    @contextlib.contextmanager
    def _flushing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.health.trouble("disk", f"the disk does not accept writes ({error})")
            raise StorageUnavailable(
                f"the disk of the server failed ({error}), so nothing can be accepted; restart the server on a working disk."
            ) from error

    async def load(self, model: ServedModel) -> None:
        """Wait until a model is loaded, for one long poll at most: only then can requests be validated."""

        def load() -> None:
            # If it cannot be loaded, the operation that needs it fails with the reason.
            with contextlib.suppress(ModelUnavailable, WorkerLost):
                model.load_on(self._lane)

        if not model.known:
            loading = asyncio.wrap_future(self._lane.call(load))
            await asyncio.wait([loading], timeout=self.config.long_poll_s)

    # ---- results

    async def wait(self, owner: str, request_id: str, timeout: float) -> Outcome | None:
        """The outcome of an operation as soon as it is committed, or None when the time is over."""
        waiters = self._loop.waiters
        waiter = waiters.enter(request_id)
        try:
            _, outcome = self._find(owner, request_id)
            if outcome is None:
                try:
                    outcome = await asyncio.wait_for(waiter, timeout)
                except TimeoutError:
                    return None
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
        self._inbox.call(lambda: self._loop.batches.watch(request_id, feed))

    def unwatch(self, request_id: str) -> None:
        """End what :meth:`watch` started."""
        self._inbox.call(lambda: self._loop.batches.unwatch(request_id))

    def queue_state(self, request_id: str) -> QueueState:
        """Why an operation has no outcome yet."""
        worker = self.backend.status
        if worker is not None and worker.unavailable is not None:
            return QueueState("paused_capacity", worker.unavailable)
        return self._table.describe(request_id)

    def cancel(self, owner: str, request_id: str) -> None:
        """Cancel a sample; other operations are not cancelled, because later ones depend on them."""
        self._find(owner, request_id)
        operation = self._table.cancel(request_id)
        if operation is not None:
            self._inbox.call(lambda: self._loop.complete_cancelled(operation))

    def _find(self, owner: str, request_id: str) -> tuple[FutureRow, Outcome | None]:
        found = self.store.futures.find_with_outcome(request_id)
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
        savepoints = store.savepoints.all()
        database = store.database.path
        files = [database, database.with_name(f"{database.name}-wal")]
        return EngineStats(
            state=self.health.state,
            troubles=self.health.troubles,
            uptime_s=time.monotonic() - self._started_at,
            operations=self._table.depths(),
            models=self._model_stats(),
            kv_limit_bytes=self.config.kv_cache_bytes,
            used=self._loop.committer.usage_totals,
            live_runs=self._loop.num_live_runs,
            polls=len(self._loop.waiters),
            journal_rows=len(store.journal),
            savepoints=len(savepoints),
            savepoint_bytes=sum(row.size_bytes for row in savepoints),
            checkpoint_bytes=store.checkpoints.total_bytes(None, time.time()),
            database_bytes=sum(file.stat().st_size for file in files if file.exists()),
            free_disk_bytes=shutil.disk_usage(store.root).free,
            worker=self.backend.status,
        )

    def _model_stats(self) -> Sequence[ModelStats]:
        found: dict[str, ModelStats] = {}
        for name in self.models.names:
            model = self.models.find(name)
            compute = model.info.computes_with if model.known else ""
            batch = self._loop.batches.stats.get(model.source, BatchStats())
            found.setdefault(model.source, ModelStats(name, compute, batch))
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
            self._lane.call(lambda: None).result()  # it removes files

    def flush_savepoints(self) -> None:
        """Write the savepoints that are due, and wait until all are complete."""
        with self._quiescent():
            self._lane.call(lambda: self._loop.savepoints.flush(self._loop.committer.turn)).result()

    @contextlib.contextmanager
    def _quiescent(self) -> Iterator[None]:
        """Nothing runs during the block, and everything that ran is committed."""
        with self._loop.paused():
            self._lane.call(lambda: None).result()
            self._inbox.call(lambda: None).result()
            yield

    def delete_checkpoint(self, checkpoint: CheckpointRow) -> None:
        """Delete a checkpoint now, and its files as soon as no job uses them."""
        forget_checkpoint(self.store, checkpoint)
        self._loop.remove_weights(checkpoint.directory)
