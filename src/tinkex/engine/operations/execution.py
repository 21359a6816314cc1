"""What each operation does to its run. Everything here happens on the engine thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from tinkex.engine.backend.seam import Backend, Checkpoint, PassJob, SavedFile, UploadedLoss
from tinkex.engine.config import EngineConfig
from tinkex.engine.operations.access import check_free, find_checkpoint, lost
from tinkex.engine.operations.backlog import Operation
from tinkex.engine.operations.losses import CustomLosses
from tinkex.engine.operations.outcomes import failed, passed, succeeded
from tinkex.engine.operations.quotas import Quotas
from tinkex.engine.operations.recording import Effect
from tinkex.engine.operations.served import Base, ServedModels
from tinkex.engine.scheduler import Work
from tinkex.engine.store import (
    CheckpointKind,
    CheckpointRow,
    Outcome,
    RunRow,
    RunStatus,
    SamplerRow,
    SavepointRow,
    Store,
)
from tinkex.errors import (
    EngineFailure,
    InvalidInput,
    ModelUnavailable,
    SetupError,
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
    LoraConfig,
    OptimStepRequest,
    OptimStepResponse,
    SaveWeightsExternalRequest,
    SaveWeightsExternalResponse,
    SaveWeightsForSamplerRequest,
    SaveWeightsForSamplerResponse,
    SaveWeightsRequest,
    SaveWeightsResponse,
    UnloadModelRequest,
    UnloadModelResponse,
)
from tinkex.types.base import Value


@dataclass
class LiveRun:
    """A run whose weights are in memory. ``version`` counts changes of its weights."""

    run_id: str
    base: Base
    next_seq: int = 1
    """The number of the operation after the last one that has run."""
    version: int = 0
    snapshot: tuple[int, str] | None = None
    """The version that was last written as an unnamed snapshot, and where."""


@dataclass(frozen=True)
class Ended:
    """An operation that has an outcome; ``ran`` is False if it never reached the weights of its run."""

    work: Work[Operation]
    outcome: Outcome
    ran: bool = True


class Operations:
    """Runs the operations of training runs, and keeps the live ones."""

    def __init__(
        self,
        config: EngineConfig,
        store: Store,
        models: ServedModels,
        backend: Backend,
        losses: CustomLosses,
    ) -> None:
        self._store = store
        self._quotas = Quotas(config, store)
        self._losses = losses
        self._models = models
        self._backend = backend
        self._effects: list[Effect] = []
        self.live: dict[str, LiveRun] = {}

    def restore(self, run_id: str, base: Base, savepoint: SavepointRow) -> None:
        """Bring a run into memory as a savepoint has it; ``Damaged`` if that is not what was written."""
        path = self._store.directories.resolve(savepoint.file)
        saved = SavedFile(path, savepoint.file, savepoint.size_bytes, savepoint.digest)
        self._backend.restore(run_id, base.source, saved)
        self.live[run_id] = LiveRun(run_id, base, next_seq=savepoint.next_seq)

    def forget(self, run_id: str) -> None:
        """Drop a run from memory, if it is there."""
        if self.live.pop(run_id, None) is not None:
            self._backend.forget(run_id)

    def worker_died(self) -> None:
        """Forget the runs that were in the worker's memory, and what the operation under way has done."""
        self.live.clear()
        self._effects = []

    def take_effects(self) -> Sequence[Effect]:
        """What the operation that ran last changes in the records, once its outcome is recorded."""
        effects, self._effects = self._effects, []
        return effects

    def run_pass(self, works: Sequence[Work[Operation]]) -> Sequence[Ended]:
        """Run forward and backward operations of one base model together; each fails or succeeds alone."""
        ended: list[Ended] = []
        jobs: list[tuple[Work[Operation], PassJob]] = []
        for work in works:
            run, request = self.live.get(work.run_id), work.request
            assert isinstance(request, ForwardBackwardRequest)
            if run is None:
                ended.append(Ended(work, failed(lost(self._store, work.run_id)), ran=False))
                continue
            run.next_seq = work.seq_id + 1
            try:
                jobs.append((work, _job(request, work.run_id, self._losses.of(work.tenant, request))))
            except TinkexError as error:
                ended.append(Ended(work, failed(error)))
        if jobs:
            results = self._backend.run_pass([job for _, job in jobs])
            for (work, _), result in zip(jobs, results, strict=True):
                outcome = failed(result) if isinstance(result, TinkexError) else passed(result)
                ended.append(Ended(work, outcome))
        return ended

    def run_alone(self, work: Work[Operation]) -> Ended:
        """Run an operation that shares its pass with no other; its own error is its outcome."""
        self._effects = []
        if work.seq_id > 0 and work.run_id not in self.live:
            return Ended(work, failed(lost(self._store, work.run_id)), ran=False)
        try:
            outcome = succeeded(self._run(work))
        except TinkexError as error:
            self._effects = []
            outcome = failed(error)
        except OSError as error:
            self._effects = []
            outcome = failed(
                EngineFailure(
                    f"the disk failed ({error}); nothing was saved. Free disk space, then save again."
                )
            )
        run = self.live.get(work.run_id)
        if run is not None:
            run.next_seq = work.seq_id + 1
        elif work.seq_id == 0:
            self._effects = [self._ends(work.run_id, RunStatus.FAILED)]
        return Ended(work, outcome)

    def _run(self, work: Work[Operation]) -> Value:
        request = work.request
        match request:
            case CreateModelRequest():
                return self._create(work)
            case LoadWeightsRequest() if work.seq_id == 0:
                return self._create_from_checkpoint(work, request)
        run = self.live[work.run_id]
        match request:
            case OptimStepRequest():
                run.version += 1
                metrics = self._backend.optim_step(run.run_id, request.adam_params or AdamParams())
                return OptimStepResponse(metrics=metrics)
            case SaveWeightsRequest():
                return self._save(run, request)
            case SaveWeightsForSamplerRequest():
                return self._save_for_sampler(run, request)
            case SaveWeightsExternalRequest():
                return self._save_external(run, request)
            case LoadWeightsRequest():
                return self._load(run, request)
            case UnloadModelRequest():
                self.forget(run.run_id)
                self._effects.append(self._ends(run.run_id, RunStatus.RELEASED))
                return UnloadModelResponse(model_id=run.run_id)
        raise EngineFailure(f"no operation is called {work.kind}")

    def _create(self, work: Work[Operation]) -> Value:
        row = self._row(work.run_id)
        if row.lora is None:
            raise InvalidInput("create_model needs a lora_config; this server trains LoRA adapters.")
        base = self.ready_base(row.base_model)
        self._backend.create(row.run_id, base.source, row.lora)
        self.live[row.run_id] = LiveRun(row.run_id, base)
        self._effects.append(self._made_live(row, row.lora))
        return CreateModelResponse(model_id=row.run_id)

    def _create_from_checkpoint(self, work: Work[Operation], request: LoadWeightsRequest) -> Value:
        row = self._row(work.run_id)
        checkpoint = find_checkpoint(self._store, row.owner, request.path, request.weights_access_token)
        base = self.ready_base(row.base_model)
        saved = self._saved(checkpoint, optimizer=request.optimizer)
        self._backend.create(row.run_id, base.source, checkpoint.lora, saved)
        self.live[row.run_id] = LiveRun(row.run_id, base, version=1)
        self._effects.append(self._made_live(row, checkpoint.lora))
        return LoadWeightsResponse(path=request.path, model_id=row.run_id)

    def _load(self, run: LiveRun, request: LoadWeightsRequest) -> Value:
        owner = self._row(run.run_id).owner
        checkpoint = find_checkpoint(self._store, owner, request.path, request.weights_access_token)
        run.version += 1
        self._backend.load_weights(run.run_id, self._saved(checkpoint, optimizer=request.optimizer))
        return LoadWeightsResponse(path=request.path, model_id=run.run_id)

    def _saved(self, checkpoint: CheckpointRow, *, optimizer: bool) -> Checkpoint:
        return Checkpoint(self._store.directories.resolve(checkpoint.directory), optimizer)

    def _save(self, run: LiveRun, request: SaveWeightsRequest) -> Value:
        assert request.path is not None, "admission refuses a save without a name"
        row = self._row(run.run_id)
        check_free(self._store, run.run_id, CheckpointKind.WEIGHTS, request.path, overwrite=request.overwrite)
        self._quotas.new_checkpoint(row.owner)
        with self._store.directories.checkpoint(run.run_id, CheckpointKind.WEIGHTS, request.path) as writing:
            self._backend.save_weights(run.run_id, writing.temporary, row.base_model, optimizer=True)
        checkpoint = _checkpoint(row, CheckpointKind.WEIGHTS, request, writing.final, writing.size_bytes)
        self._record(checkpoint)
        return SaveWeightsResponse(path=checkpoint.path)

    def _save_for_sampler(self, run: LiveRun, request: SaveWeightsForSamplerRequest) -> Value:
        row = self._row(run.run_id)
        if request.path is None:
            return self._snapshot(run, row, request)
        check_free(self._store, run.run_id, CheckpointKind.SAMPLER_WEIGHTS, request.path, overwrite=False)
        self._quotas.new_checkpoint(row.owner)
        with self._store.directories.checkpoint(
            run.run_id, CheckpointKind.SAMPLER_WEIGHTS, request.path
        ) as writing:
            self._backend.save_weights(run.run_id, writing.temporary, row.base_model, optimizer=False)
        checkpoint = _checkpoint(
            row, CheckpointKind.SAMPLER_WEIGHTS, request, writing.final, writing.size_bytes
        )
        self._record(checkpoint)
        self._backend.keep_adapter(run.run_id, writing.final)
        return SaveWeightsForSamplerResponse(path=checkpoint.path)

    def _save_external(self, run: LiveRun, request: SaveWeightsExternalRequest) -> Value:
        row, kind = self._row(run.run_id), CheckpointKind.EXTERNAL_WEIGHTS
        check_free(self._store, run.run_id, kind, request.path, overwrite=False)
        self._quotas.new_checkpoint(row.owner)
        with self._store.directories.checkpoint(run.run_id, kind, request.path) as writing:
            self._backend.export_weights(
                run.run_id, writing.temporary, row.base_model, request.age_encryption_recipients
            )
        checkpoint = _checkpoint(row, kind, request, writing.final, writing.size_bytes)
        self._record(checkpoint)
        return SaveWeightsExternalResponse(path=checkpoint.path, size_bytes=writing.size_bytes)

    def _snapshot(self, run: LiveRun, row: RunRow, request: SaveWeightsForSamplerRequest) -> Value:
        sampler_id = f"{row.session_id}:sample:{request.sampling_session_seq_id}"
        if self._store.samplers.get(sampler_id) is not None:
            raise InvalidInput(
                f"sampling_session_seq_id {request.sampling_session_seq_id} of this session is in use already."
            )
        if run.snapshot is None or run.snapshot[0] != run.version:
            with self._store.directories.snapshot() as writing:
                self._backend.save_weights(run.run_id, writing.temporary, row.base_model, optimizer=False)
            run.snapshot = (run.version, writing.final)
            self._backend.keep_adapter(run.run_id, writing.final)
        sampler = SamplerRow(
            sampler_id=sampler_id,
            session_id=row.session_id,
            owner=row.owner,
            base_model=row.base_model,
            created_at=time.time(),
            directory=run.snapshot[1],
        )
        self._effects.append(lambda: self._store.samplers.add(sampler))
        return SaveWeightsForSamplerResponse(sampling_session_id=sampler_id)

    def _record(self, checkpoint: CheckpointRow) -> None:
        def remove(directory: str) -> None:
            self._backend.drop_adapter(directory)
            self._store.directories.remove(directory)

        def put() -> Callable[[], None] | None:
            replaced = self._store.checkpoints.put(checkpoint)
            return partial(remove, replaced) if replaced is not None else None

        self._effects.append(put)

    def _made_live(self, row: RunRow, lora: LoraConfig) -> Effect:
        return lambda: self._store.runs.made_live(row.run_id, row.base_model, lora)

    def _ends(self, run_id: str, status: RunStatus) -> Effect:
        return lambda: self._store.runs.set_status(run_id, status)

    def _row(self, run_id: str) -> RunRow:
        row = self._store.runs.get(run_id)
        if row is None:
            raise UnknownObject(f"there is no run {run_id}.")
        return row

    def ready_base(self, name: str) -> Base:
        """A base model, in memory."""
        base = self._models.find(name)
        try:
            base.load()
        except SetupError as error:
            raise ModelUnavailable(f"the model {name} cannot be loaded: {error}") from error
        return base


def _job(request: ForwardBackwardRequest, run_id: str, custom_loss: UploadedLoss | None) -> PassJob:
    """What the worker is asked to do for a pass."""
    return PassJob(
        run_id, request.data, request.loss_fn, request.loss_fn_config, not request.forward_only, custom_loss
    )


def _checkpoint(
    row: RunRow,
    kind: CheckpointKind,
    request: SaveWeightsRequest | SaveWeightsForSamplerRequest | SaveWeightsExternalRequest,
    directory: str,
    size_bytes: int,
) -> CheckpointRow:
    assert row.lora is not None, "a live run has a LoRA configuration"
    assert request.path is not None
    now = time.time()
    return CheckpointRow(
        run_id=row.run_id,
        kind=kind,
        name=request.path,
        owner=row.owner,
        base_model=row.base_model,
        lora=row.lora,
        has_optimizer=kind is CheckpointKind.WEIGHTS,
        created_at=now,
        size_bytes=size_bytes,
        directory=directory,
        optimizer_config=row.optimizer_config,
        expires_at=now + request.ttl_seconds if request.ttl_seconds is not None else None,
        user_metadata=None if isinstance(request, SaveWeightsExternalRequest) else request.user_metadata,
    )
