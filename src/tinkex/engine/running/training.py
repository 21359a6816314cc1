"""What each training operation does to its run. Everything here runs on a lane's thread."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tinkex.engine.config import EngineConfig
from tinkex.engine.encoding import failed, passed, succeeded
from tinkex.engine.lanes.interface import PassJob, SavedWeights, SavepointFile
from tinkex.engine.lanes.lane import Lane
from tinkex.engine.lookup import check_name_is_free, find_checkpoint, run_lost
from tinkex.engine.operation import Kind, Operation
from tinkex.engine.passes import read_job
from tinkex.engine.quotas import Quotas
from tinkex.engine.served_models import ServedModel, ServedModels
from tinkex.engine.store import (
    CheckpointKind,
    CheckpointRow,
    FutureStatus,
    Outcome,
    RunRow,
    RunStatus,
    SamplerRow,
    SavepointRow,
    Store,
    UsageKind,
)
from tinkex.engine.store.changes import Change, CheckpointSaved, RunEnded, RunLive, SamplerCreated
from tinkex.errors import EngineFailure, InvalidInput, TinkexError, UnknownObject
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
    """A run whose weights are in memory."""

    run_id: str
    model: ServedModel
    next_seq: int = 1
    """The number after the last operation that has run."""
    version: int = 0
    """Counts changes of its weights."""
    snapshot: tuple[int, str] | None = None
    """The version that was last written as an unnamed snapshot, and its directory."""


@dataclass(frozen=True)
class Result:
    """The outcome of one operation; ``ran`` is False if it never reached the weights of its run."""

    operation: Operation
    outcome: Outcome
    ran: bool = True

    @property
    def succeeded(self) -> bool:
        """Whether the operation did what it was asked to."""
        return self.outcome.status is FutureStatus.DONE

    @property
    def usage(self) -> Mapping[UsageKind, int]:
        """What the operation used."""
        kind = self.operation.kind
        if not self.succeeded:
            return {}
        if kind.packs:
            return {UsageKind.TRAINING: self.operation.num_tokens}
        if kind in SAVES and getattr(self.operation.request, "path", None) is not None:
            return {UsageKind.CHECKPOINT: 1}
        return {}


@dataclass
class TurnResult:
    """The results of a turn, and what it changed in the records."""

    results: Sequence[Result]
    changes: list[Change] = field(default_factory=list)
    unrecoverable: Mapping[str, str] = field(default_factory=dict)
    """Runs that could not be restored, with the reason."""


SAVES = frozenset({Kind.SAVE, Kind.SAVE_FOR_SAMPLER, Kind.SAVE_EXTERNAL})


class TrainingRuns:
    """Executes operations of training runs, and holds the live ones of one lane."""

    def __init__(self, config: EngineConfig, store: Store, models: ServedModels, lane: Lane) -> None:
        self._store = store
        self._quotas = Quotas(config, store)
        self._models = models
        self._lane = lane
        self._backend = lane.backend
        self.live: dict[str, LiveRun] = {}

    def load_model(self, name: str) -> ServedModel:
        """A base model, loaded on the lane."""
        model = self._models.find(name)
        model.load_on(self._lane)
        return model

    def restore(self, run_id: str, model: ServedModel, savepoint: SavepointRow) -> None:
        """Restore a run from a savepoint; raises ``CorruptState`` if the file is not what was written."""
        path = self._store.directories.resolve(savepoint.file)
        saved = SavepointFile(path, savepoint.file, savepoint.size_bytes, savepoint.digest)
        self._backend.restore(run_id, model.source, saved)
        self.live[run_id] = LiveRun(run_id, model, next_seq=savepoint.next_seq)

    def forget(self, run_id: str) -> None:
        """Drop a run from memory, if it is there."""
        if self.live.pop(run_id, None) is not None:
            self._backend.forget(run_id)

    # ---- passes

    def run_pass(self, operations: Iterable[Operation]) -> TurnResult:
        """Run forward and backward operations of one base model together; each fails or succeeds alone."""
        results: dict[str, Result] = {}
        jobs: list[tuple[Operation, PassJob]] = []
        for operation in operations:
            run = self.live.get(operation.run_id)
            if run is None:
                lost = run_lost(self._store, operation.run_id)
                results[operation.request_id] = Result(operation, failed(lost), ran=False)
                continue
            run.next_seq = operation.seq_id + 1
            try:
                jobs.append((operation, operation.job or self._read_job(operation, run)))
            except TinkexError as error:
                results[operation.request_id] = Result(operation, failed(error))
        if jobs:
            outputs = self._backend.run_pass([job for _, job in jobs])
            for (operation, _), output in zip(jobs, outputs, strict=True):
                outcome = failed(output) if isinstance(output, TinkexError) else passed(output)
                results[operation.request_id] = Result(operation, outcome)
        return TurnResult([results[operation.request_id] for operation in operations])

    def _read_job(self, operation: Operation, run: LiveRun) -> PassJob:
        request = operation.request
        assert isinstance(request, ForwardBackwardRequest)
        return read_job(self._store, operation.owner, operation.run_id, request, run.model.info)

    # ---- everything else

    def run_barrier(self, operation: Operation) -> TurnResult:
        """Run an operation that shares its turn with no other; its own error is its outcome."""
        run_id = operation.run_id
        if operation.seq_id > 0 and run_id not in self.live:
            return TurnResult([Result(operation, failed(run_lost(self._store, run_id)), ran=False)])
        changes: list[Change] = []
        try:
            value, changes = self._execute(operation)
            outcome = succeeded(value)
        except TinkexError as error:
            outcome = failed(error)
        except OSError as error:
            outcome = failed(
                EngineFailure(
                    f"the disk failed ({error}); nothing was saved. Free disk space, then save again."
                )
            )
        run = self.live.get(run_id)
        if run is not None:
            run.next_seq = operation.seq_id + 1
        elif operation.seq_id == 0:
            changes = [RunEnded(run_id, RunStatus.FAILED)]
        return TurnResult([Result(operation, outcome)], changes)

    def _execute(self, operation: Operation) -> tuple[Value, list[Change]]:
        request = operation.request
        match request:
            case CreateModelRequest():
                return self._create(self._row(operation.run_id))
            case LoadWeightsRequest() if operation.seq_id == 0:
                return self._create_from_checkpoint(self._row(operation.run_id), request)
        run = self.live[operation.run_id]
        match request:
            case OptimStepRequest():
                run.version += 1
                metrics = self._backend.optim_step(run.run_id, request.adam_params or AdamParams())
                return OptimStepResponse(metrics=metrics), []
            case SaveWeightsRequest():
                return self._save(run, CheckpointKind.WEIGHTS, request)
            case SaveWeightsForSamplerRequest() if request.path is None:
                return self._save_snapshot(run, request)
            case SaveWeightsForSamplerRequest():
                return self._save(run, CheckpointKind.SAMPLER_WEIGHTS, request)
            case SaveWeightsExternalRequest():
                return self._save(run, CheckpointKind.EXTERNAL_WEIGHTS, request)
            case LoadWeightsRequest():
                return self._load(run, request)
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
        self.live[row.run_id] = LiveRun(row.run_id, model)
        return CreateModelResponse(model_id=row.run_id), [RunLive(row.run_id, row.base_model, row.lora)]

    def _create_from_checkpoint(self, row: RunRow, request: LoadWeightsRequest) -> tuple[Value, list[Change]]:
        checkpoint = find_checkpoint(self._store, row.owner, request.path, request.weights_access_token)
        model = self.load_model(row.base_model)
        saved = self._saved_weights(checkpoint, optimizer=request.optimizer)
        self._backend.create(row.run_id, model.source, checkpoint.lora, saved)
        self.live[row.run_id] = LiveRun(row.run_id, model, version=1)
        live = RunLive(row.run_id, row.base_model, checkpoint.lora)
        return LoadWeightsResponse(path=request.path, model_id=row.run_id), [live]

    def _load(self, run: LiveRun, request: LoadWeightsRequest) -> tuple[Value, list[Change]]:
        owner = self._row(run.run_id).owner
        checkpoint = find_checkpoint(self._store, owner, request.path, request.weights_access_token)
        run.version += 1
        self._backend.load_weights(run.run_id, self._saved_weights(checkpoint, optimizer=request.optimizer))
        return LoadWeightsResponse(path=request.path, model_id=run.run_id), []

    def _saved_weights(self, checkpoint: CheckpointRow, *, optimizer: bool) -> SavedWeights:
        return SavedWeights(self._store.directories.resolve(checkpoint.directory), optimizer)

    def _save(
        self,
        run: LiveRun,
        kind: CheckpointKind,
        request: SaveWeightsRequest | SaveWeightsForSamplerRequest | SaveWeightsExternalRequest,
    ) -> tuple[Value, list[Change]]:
        assert request.path is not None, "intake rejects a save without a name"
        row, run_id = self._row(run.run_id), run.run_id
        overwrite = isinstance(request, SaveWeightsRequest) and request.overwrite
        check_name_is_free(self._store, run_id, kind, request.path, overwrite=overwrite)
        self._quotas.check_new_checkpoint(row.owner)
        with self._store.directories.checkpoint(run_id, kind, request.path) as writing:
            if isinstance(request, SaveWeightsExternalRequest):
                recipients = request.age_encryption_recipients
                self._backend.export_weights(run_id, writing.temporary, row.base_model, recipients)
            else:
                optimizer = kind is CheckpointKind.WEIGHTS
                self._backend.save_weights(run_id, writing.temporary, row.base_model, optimizer=optimizer)
        saved = CheckpointSaved(_checkpoint_row(row, kind, request, writing.final, writing.size_bytes))
        path = saved.checkpoint.path
        if kind is CheckpointKind.SAMPLER_WEIGHTS:
            self._backend.keep_adapter(run_id, writing.final)
            return SaveWeightsForSamplerResponse(path=path), [saved]
        if kind is CheckpointKind.EXTERNAL_WEIGHTS:
            return SaveWeightsExternalResponse(path=path, size_bytes=writing.size_bytes), [saved]
        return SaveWeightsResponse(path=path), [saved]

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
        return SaveWeightsForSamplerResponse(sampling_session_id=sampler_id), [SamplerCreated(sampler)]

    def _row(self, run_id: str) -> RunRow:
        row = self._store.runs.get(run_id)
        if row is None:
            raise UnknownObject(f"there is no run {run_id}.")
        return row


def _checkpoint_row(
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
