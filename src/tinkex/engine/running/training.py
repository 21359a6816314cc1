"""What each training operation does to its run. Everything here runs on a lane's thread."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import partial
from uuid import uuid4

from tinkex.engine.config import EngineConfig
from tinkex.engine.encoding import failed, read_request, succeeded
from tinkex.engine.lanes.interface import Backend, PassJob, PassReport, StepResult
from tinkex.engine.lookup import check_name_is_free, find_checkpoint, run_lost
from tinkex.engine.model.lora_layout import STATE_BUFFERS, state_bytes
from tinkex.engine.operation import CHECKPOINT_KINDS, Kind, Operation, SaveRequest
from tinkex.engine.passes import digest_of, read_job
from tinkex.engine.quotas import Quotas
from tinkex.engine.running.sharded_passes import AdapterCopies, RunAdapter, ShardedPasses, ShardExchange
from tinkex.engine.served_models import ServedModel, ServedModels
from tinkex.engine.store import (
    CheckpointKind,
    CheckpointRow,
    GradientCleared,
    Outcome,
    PassEnded,
    ResultFormat,
    RunRow,
    RunStatus,
    SamplerRow,
    SavepointRow,
    SnapshotRow,
    StepEnded,
    Store,
    UsageKind,
)
from tinkex.engine.store.changes import Change, RunEnded, RunLive, SamplerCreated
from tinkex.errors import (
    EngineError,
    EngineFailure,
    InvalidInput,
    ModelUnavailable,
    NumericalError,
    TinkexError,
    UnknownObject,
)
from tinkex.types import (
    AdamParams,
    CreateModelRequest,
    CreateModelResponse,
    ForwardBackwardRequest,
    LoadWeightsRequest,
    LoadWeightsResponse,
    OptimStepRequest,
    OptimStepResponse,
    SaveWeightsExternalRequest,
    SaveWeightsExternalResponseInternal,
    SaveWeightsForSamplerRequest,
    SaveWeightsForSamplerResponseInternal,
    SaveWeightsRequest,
    SaveWeightsResponse,
    UnloadModelRequest,
    UnloadModelResponse,
)
from tinkex.types.base import Value

logger = logging.getLogger("tinkex.engine")


@dataclass
class LiveRun:
    """A run whose weights are in memory."""

    run_id: str
    model: ServedModel
    next_seq: int = 1
    """The number after the last operation that has run."""
    version: int = 0
    """Counts changes of its weights."""
    snapshot: tuple[int, SnapshotRow] | None = None
    """The version that was last written as an unnamed snapshot, and the snapshot."""
    num_bytes: int = 0
    """Its weights, gradient and moments."""
    used_at: float = field(default_factory=time.monotonic)
    """When an operation of it last ran."""
    incarnation: str = field(default_factory=lambda: uuid4().hex)
    """Tells it apart from what was in memory under its name before."""

    @property
    def adapter(self) -> RunAdapter:
        """Its weights, as they are now."""
        key = f"{self.run_id}/{self.incarnation}/{self.version}"
        return RunAdapter(self.model, key, self.num_bytes // STATE_BUFFERS)


OUT_OF_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE})
DESCRIPTOR_WAIT_S = 60.0
"""How long a save waits for a free file descriptor; connections and other files release theirs."""
DESCRIPTOR_RETRY_S = 0.1
SAVES = frozenset({Kind.SAVE, Kind.SAVE_FOR_SAMPLER, Kind.SAVE_EXTERNAL})


class TrainingRuns:
    """Executes operations of training runs, and holds the live ones of one lane."""

    def __init__(
        self,
        config: EngineConfig,
        store: Store,
        models: ServedModels,
        backend: Backend,
        exchange: ShardExchange,
    ) -> None:
        self._store = store
        self._shards = ShardedPasses(config, backend, exchange)
        self._exchange = exchange
        self._quotas = Quotas(config, store)
        self._models = models
        self._backend = backend
        self.live: dict[str, LiveRun] = {}
        self.copies = AdapterCopies(backend)
        """Adapters of runs of other trainers, for shards of their passes."""
        self._suspended: Sequence[Operation] = ()

    @property
    def live_bytes(self) -> int:
        """The memory of the live runs: weights, gradients and moments; and of adapters of others. Safe on any thread."""
        return sum(run.num_bytes for run in tuple(self.live.values())) + self.copies.num_bytes

    def run_bytes(self, run_id: str) -> int:
        """The memory of a run, live or not; 0 while its base model is not loaded. Safe on any thread."""
        live = self.live.get(run_id)
        if live is not None:
            return live.num_bytes
        row = self._store.runs.get(run_id)
        if row is None or row.lora is None:
            return 0
        try:
            return state_bytes(self._models.find(row.base_model).info.arch, row.lora)
        except (ModelUnavailable, UnknownObject):
            return 0

    def new_run_bytes(self, operation: Operation) -> int:
        """The memory of a run that an operation creates; 0 if it cannot create it."""
        row = self._store.runs.get(operation.run_id)
        if row is None or row.lora is not None:
            return self.run_bytes(operation.run_id)
        try:
            request = read_request(self._store, operation)
            if not isinstance(request, LoadWeightsRequest):
                return 0
            checkpoint = find_checkpoint(
                self._store, operation.owner, request.path, request.weights_access_token
            )
            return state_bytes(self._models.find(row.base_model).info.arch, checkpoint.lora)
        except EngineError:
            return 0

    def load_model(self, name: str) -> ServedModel:
        """A base model, loaded on the lane."""
        model = self._models.find(name)
        model.load_on(self._backend)
        return model

    def find_model(self, name: str) -> ServedModel:
        """A base model that has been loaded once, so that its shape is known."""
        model = self._models.find(name)
        return model if model.known else self.load_model(name)

    def restore(self, model: ServedModel, savepoint: SavepointRow) -> None:
        """Restore a run from its savepoint; raises ``CorruptState`` if the file is not what was written."""
        num_bytes = self.run_bytes(savepoint.run_id)
        self._backend.restore(model.source, savepoint)
        self.live[savepoint.run_id] = LiveRun(
            savepoint.run_id, model, next_seq=savepoint.next_seq, num_bytes=num_bytes
        )

    def forget(self, run_id: str) -> None:
        """Drop a run from memory, if it is there."""
        if self.live.pop(run_id, None) is not None:
            self._exchange.retire(run_id)
            self._backend.forget(run_id)

    # ---- passes

    def run_pass(
        self, operations: Sequence[Operation], *, prefix_sharing: bool, cut: tuple[int, int] | None = None
    ) -> bool:
        """Run forward and backward operations of one base model together, and set their outcomes; each fails or succeeds alone.

        ``cut`` is the number of shards, and of their threads, that a turn is repeated with. Returns False if others should have
        their turn before it continues with :meth:`resume_pass`; until then the runs are as they were before.
        """
        jobs: list[tuple[Operation, PassJob]] = []
        for operation in operations:
            run = self.live.get(operation.run_id)
            if run is None:
                operation.outcome = failed(run_lost(self._store, operation.run_id))
                continue
            operation.prefix_sharing = prefix_sharing
            try:
                job = operation.job or self._read_job(operation, run)
                operation.loss = digest_of(job.custom_loss)
                jobs.append((operation, job))
                operation.ran = True
            except TinkexError as error:
                operation.outcome = failed(error)
                self._record_run(operation)
        results: Sequence[PassReport] | None = None if jobs else ()
        if len(jobs) == 1:
            ((operation, job),) = jobs
            adapter = self.live[job.run_id].adapter
            results = self._shards.run(operation, job, adapter, cut, prefix_sharing=prefix_sharing)
        if results is None:
            results = self._backend.run_pass([job for _, job in jobs], share_prefixes=prefix_sharing)
        return self._end_pass([operation for operation, _ in jobs], results)

    def resume_pass(self) -> bool:
        """Continue with the pass that was suspended; returns whether it has ended."""
        operations, self._suspended = self._suspended, ()
        return self._end_pass(operations, self._backend.resume_pass())

    @property
    def suspended_runs(self) -> AbstractSet[str]:
        """The runs of the suspended pass: they must stay in memory, and nothing else of theirs runs. Safe on any thread."""
        return {operation.run_id for operation in self._suspended}

    def clear(self) -> None:
        """Forget all runs, and the suspended pass: their backend is gone."""
        self._exchange.retire(*self.live)
        self.live.clear()
        self.copies.clear()
        self._suspended = ()

    def _end_pass(self, operations: Sequence[Operation], results: Sequence[PassReport] | None) -> bool:
        if results is None:
            self._suspended = operations
            return False
        for operation, result in zip(operations, results, strict=True):
            self._record_run(operation)
            operation.loss_tokens, operation.num_datums = result.loss_tokens, result.loss_datums
            operation.tokens_computed = result.tokens_computed
            if isinstance(result.output, TinkexError):
                operation.outcome = failed(result.output)
            else:
                operation.outcome = Outcome.done(result.output, ResultFormat.PROTO)
                if operation.kind is Kind.FORWARD_BACKWARD:
                    operation.loop_event = PassEnded(
                        operation.run_id,
                        operation.owner,
                        operation.num_tokens,
                        result.num_datums,
                        operation.started_at,
                        result.metrics,
                    )
                operation.usage = {
                    UsageKind.TRAINING: operation.num_tokens,
                    UsageKind.TRAINING_COMPUTED: operation.tokens_computed,
                }
        return True

    def _record_run(self, operation: Operation) -> None:
        """Record that an operation of a run has run."""
        run = self.live.get(operation.run_id)
        if run is not None:
            run.next_seq, run.used_at = operation.seq_id + 1, time.monotonic()

    def _read_job(self, operation: Operation, run: LiveRun) -> PassJob:
        """The job of a pass that was not kept in memory, or whose model had not been loaded when it was accepted."""
        request = read_request(self._store, operation)
        assert isinstance(request, ForwardBackwardRequest)
        operation.ran = True  # whatever is wrong with it
        return read_job(self._store, operation.owner, operation.run_id, request, run.model.info)

    # ---- optimizer steps

    def run_steps(self, operations: Sequence[Operation]) -> Mapping[str, Exception]:
        """Run optimizer steps of different runs, and set their outcomes; each fails or succeeds alone.

        Returns the errors of those without an outcome, by run: what failed is the engine. If the worker is lost, those that had
        ended before have an outcome.
        """
        steps: list[tuple[Operation, AdamParams]] = []
        for operation in operations:
            run = self.live.get(operation.run_id)
            if run is None:
                operation.outcome = failed(run_lost(self._store, operation.run_id))
                continue
            self._record_run(operation)
            try:
                request = read_request(self._store, operation)
            except TinkexError as error:
                operation.outcome = failed(error)
                continue
            assert isinstance(request, OptimStepRequest)
            operation.ran = True
            run.version += 1
            self._exchange.retire(run.run_id)
            steps.append((operation, request.adam_params or AdamParams()))
        results: list[StepResult] = []
        errors: dict[str, Exception] = {}
        try:
            self._backend.optim_steps([(each.run_id, params) for each, params in steps], results)
        finally:
            for (operation, _), result in zip(steps, results, strict=False):
                if not isinstance(result, Exception):
                    operation.outcome = succeeded(OptimStepResponse(metrics=dict(result)))
                    operation.loop_event = StepEnded(operation.run_id, operation.owner, result)
                elif isinstance(result, TinkexError):
                    operation.outcome = failed(result)
                    if isinstance(result, NumericalError):
                        operation.loop_event = GradientCleared(operation.run_id)
                else:
                    errors[operation.run_id] = result
        return errors

    # ---- everything else

    def run_barrier(self, operation: Operation) -> list[Change]:
        """Run an operation that shares its turn with no other, and set its outcome; returns what it changed in the records."""
        run_id = operation.run_id
        if operation.seq_id > 0 and run_id not in self.live:
            operation.outcome = failed(run_lost(self._store, run_id))
            return []
        changes: list[Change] = []
        try:
            value, changes = self._execute_with_retries(operation)
            operation.outcome = succeeded(value)
        except TinkexError as error:
            operation.outcome = failed(error)
        except OSError as error:
            fix = "Raise the server's limit of open files (ulimit -n)"
            fix = fix if error.errno in OUT_OF_DESCRIPTORS else "Free disk space"
            failure = f"the disk failed ({error}); nothing was saved. {fix}, then save again."
            operation.outcome = failed(EngineFailure(failure))
        self._record_run(operation)
        if run_id not in self.live and operation.seq_id == 0:
            changes = [RunEnded(run_id, RunStatus.FAILED)]
        if any(isinstance(change, CheckpointRow) for change in changes):
            operation.usage = {UsageKind.CHECKPOINT: 1}
        return changes

    def _execute_with_retries(self, operation: Operation) -> tuple[Value, list[Change]]:
        """Runs an operation; a save waits while the process has no free file descriptor."""
        deadline: float | None = None
        while True:
            try:
                return self._execute(operation)
            except OSError as error:
                if error.errno not in OUT_OF_DESCRIPTORS or operation.kind not in SAVES:
                    raise
                if deadline is None:
                    logger.warning("%s of %s is retried: %s", operation.kind.value, operation.run_id, error)
                    deadline = time.monotonic() + DESCRIPTOR_WAIT_S
                if time.monotonic() >= deadline:
                    raise
                time.sleep(DESCRIPTOR_RETRY_S)

    def _execute(self, operation: Operation) -> tuple[Value, list[Change]]:
        request = read_request(self._store, operation)
        operation.ran = True
        match request:
            case CreateModelRequest():
                return self._create(self._row(operation.run_id))
            case LoadWeightsRequest() if operation.seq_id == 0:
                return self._create_from_checkpoint(self._row(operation.run_id), request)
        run = self.live[operation.run_id]
        match request:
            case SaveWeightsForSamplerRequest() if request.path is None:
                return self._save_snapshot(run, request)
            case SaveWeightsRequest() | SaveWeightsForSamplerRequest() | SaveWeightsExternalRequest():
                return self._save(run, request)
            case LoadWeightsRequest():
                return self._load(run, operation, request)
            case UnloadModelRequest():
                self.forget(run.run_id)
                ended: list[Change] = [RunEnded(run.run_id, RunStatus.RELEASED)]
                return UnloadModelResponse(model_id=run.run_id), ended
        raise EngineFailure(f"there is no operation of kind {operation.kind}")

    def _create(self, row: RunRow) -> tuple[Value, list[Change]]:
        if row.lora is None:
            raise InvalidInput("create_model needs a lora_config; this server trains LoRA adapters.")
        model = self.load_model(row.base_model)
        self._backend.create(row.run_id, model.source, row.lora)
        num_bytes = state_bytes(model.info.arch, row.lora)
        self.live[row.run_id] = LiveRun(row.run_id, model, num_bytes=num_bytes)
        return CreateModelResponse(model_id=row.run_id), [RunLive(row.run_id, row.base_model, row.lora)]

    def _create_from_checkpoint(self, row: RunRow, request: LoadWeightsRequest) -> tuple[Value, list[Change]]:
        checkpoint = find_checkpoint(self._store, row.owner, request.path, request.weights_access_token)
        model = self.load_model(row.base_model)
        self._backend.create(row.run_id, model.source, checkpoint.lora)
        try:
            self._load_weights(row.run_id, checkpoint, request)
        except Exception:
            self._backend.forget(row.run_id)
            raise
        num_bytes = state_bytes(model.info.arch, checkpoint.lora)
        self.live[row.run_id] = LiveRun(row.run_id, model, version=1, num_bytes=num_bytes)
        live = RunLive(row.run_id, row.base_model, checkpoint.lora)
        return LoadWeightsResponse(path=request.path, model_id=row.run_id), [live]

    def _load(
        self, run: LiveRun, operation: Operation, request: LoadWeightsRequest
    ) -> tuple[Value, list[Change]]:
        owner = self._row(run.run_id).owner
        checkpoint = find_checkpoint(self._store, owner, request.path, request.weights_access_token)
        run.version += 1
        self._exchange.retire(run.run_id)
        self._load_weights(run.run_id, checkpoint, request)
        operation.loop_event = GradientCleared(run.run_id)
        return LoadWeightsResponse(path=request.path, model_id=run.run_id), []

    def _load_weights(self, run_id: str, checkpoint: CheckpointRow, request: LoadWeightsRequest) -> None:
        directory = self._store.directories.resolve(checkpoint.directory)
        self._backend.load_weights(run_id, directory, optimizer=request.optimizer)

    def _save(self, run: LiveRun, request: SaveRequest) -> tuple[Value, list[Change]]:
        assert request.path is not None, "intake rejects a save without a name"
        row, run_id, kind = self._row(run.run_id), run.run_id, CHECKPOINT_KINDS[type(request)]
        assert row.lora is not None, "a live run has a LoRA configuration"
        overwrite = isinstance(request, SaveWeightsRequest) and request.overwrite
        check_name_is_free(self._store, run_id, kind, request.path, overwrite=overwrite)
        replaced = self._store.checkpoints.get(run_id, kind, request.path)
        spare = replaced.size_bytes if replaced is not None else 0

        def check_size(size_bytes: int) -> None:
            self._quotas.check_room(row.owner, size_bytes - spare)

        with self._store.directories.checkpoint(run_id, kind, request.path, check_size) as writing:
            if isinstance(request, SaveWeightsExternalRequest):
                recipients = request.age_encryption_recipients
                self._backend.export_weights(run_id, writing.temporary, row.base_model, recipients)
            else:
                optimizer = kind is CheckpointKind.WEIGHTS
                self._backend.save_weights(run_id, writing.temporary, row.base_model, optimizer=optimizer)
        now = time.time()
        saved = CheckpointRow(
            run_id=run_id,
            kind=kind,
            name=request.path,
            owner=row.owner,
            base_model=row.base_model,
            lora=row.lora,
            has_optimizer=kind is CheckpointKind.WEIGHTS,
            created_at=now,
            size_bytes=writing.size_bytes,
            directory=writing.final,
            optimizer_config=row.optimizer_config,
            expires_at=now + request.ttl_seconds if request.ttl_seconds is not None else None,
            user_metadata=None if isinstance(request, SaveWeightsExternalRequest) else request.user_metadata,
        )
        if kind is CheckpointKind.SAMPLER_WEIGHTS:
            self._backend.keep_adapter(run_id, writing.final)
            return SaveWeightsForSamplerResponseInternal(path=saved.path), [saved]
        if kind is CheckpointKind.EXTERNAL_WEIGHTS:
            return SaveWeightsExternalResponseInternal(path=saved.path, size_bytes=writing.size_bytes), [
                saved
            ]
        return SaveWeightsResponse(path=saved.path), [saved]

    def _save_snapshot(
        self, run: LiveRun, request: SaveWeightsForSamplerRequest
    ) -> tuple[Value, list[Change]]:
        row = self._row(run.run_id)
        sampler_id = f"{row.session_id}:sample:{request.sampling_session_seq_id}"
        if self._store.samplers.get(sampler_id) is not None:
            raise InvalidInput(
                f"sampling_session_seq_id {request.sampling_session_seq_id} of this session is in use already."
            )
        if run.snapshot is None or run.snapshot[0] != run.version:
            with self._store.directories.snapshot(partial(self._quotas.check_room, row.owner)) as writing:
                self._backend.save_weights(run.run_id, writing.temporary, row.base_model, optimizer=False)
            run.snapshot = (
                run.version,
                SnapshotRow(writing.final, run.run_id, row.owner, time.time(), writing.size_bytes),
            )
            self._backend.keep_adapter(run.run_id, writing.final)
        sampler = SamplerRow(
            sampler_id=sampler_id,
            session_id=row.session_id,
            owner=row.owner,
            base_model=row.base_model,
            created_at=time.time(),
            directory=run.snapshot[1].directory,
            inflight_run_id=run.run_id if request.kind == "inflight" else None,
        )
        return SaveWeightsForSamplerResponseInternal(sampling_session_id=sampler_id), [
            SamplerCreated(sampler, run.snapshot[1])
        ]

    def _row(self, run_id: str) -> RunRow:
        row = self._store.runs.get(run_id)
        if row is None:
            raise UnknownObject(f"there is no run {run_id}.")
        return row
