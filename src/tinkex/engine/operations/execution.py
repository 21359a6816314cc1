"""What each operation does to its run. Everything here happens on the engine thread."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinkex.engine.operations.access import check_free, find_checkpoint
from tinkex.engine.operations.backlog import Operation
from tinkex.engine.operations.outcomes import failed, succeeded
from tinkex.engine.operations.served import Base, ServedModels
from tinkex.engine.operations.snapshots import Snapshots
from tinkex.engine.scheduler import Work
from tinkex.engine.store import (
    CheckpointKind,
    CheckpointRow,
    Outcome,
    RunRow,
    SamplerRow,
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
    OptimStepRequest,
    OptimStepResponse,
    SaveWeightsForSamplerRequest,
    SaveWeightsForSamplerResponse,
    SaveWeightsRequest,
    SaveWeightsResponse,
    UnloadModelRequest,
    UnloadModelResponse,
)
from tinkex.types.base import Value

if TYPE_CHECKING:
    from tinkex.engine.trainer.state import TrainJob, TrainState


@dataclass
class LiveRun:
    """A run whose weights are in memory. ``version`` counts changes of its weights."""

    run_id: str
    base: Base
    state: TrainState
    version: int = 0
    snapshot: tuple[int, str] | None = None
    """The version that was last written as an unnamed snapshot, and where."""

    def job(self, request: ForwardBackwardRequest) -> TrainJob:
        """What the trainer is asked to do for a request."""
        from tinkex.engine.trainer.state import TrainJob

        backward = not request.forward_only
        return TrainJob(self.state, request.data, request.loss_fn, request.loss_fn_config, backward)


class Operations:
    """Runs the operations of training runs, and keeps the live ones."""

    def __init__(self, store: Store, models: ServedModels, snapshots: Snapshots) -> None:
        self._store = store
        self._models = models
        self._snapshots = snapshots
        self.live: dict[str, LiveRun] = {}

    def run_pass(self, works: Sequence[Work[Operation]]) -> Sequence[tuple[str, Outcome]]:
        """Run forward and backward operations of one base model together; each fails or succeeds alone."""
        outcomes: list[tuple[str, Outcome]] = []
        jobs: list[tuple[Work[Operation], TrainJob]] = []
        for work in works:
            run, request = self.live.get(work.run_id), work.request
            assert isinstance(request, ForwardBackwardRequest)
            if run is None:
                outcomes.append((work.request_id, failed(_not_live(work.run_id))))
            else:
                jobs.append((work, run.job(request)))
        if jobs:
            results = self.live[jobs[0][0].run_id].base.trainer.run([job for _, job in jobs])
            for (work, _), result in zip(jobs, results, strict=True):
                outcome = failed(result) if isinstance(result, TinkexError) else succeeded(result)
                outcomes.append((work.request_id, outcome))
        return outcomes

    def run_alone(self, work: Work[Operation]) -> Outcome:
        """Run an operation that shares its pass with no other; its own error is its outcome."""
        try:
            return succeeded(self._run(work))
        except TinkexError as error:
            return failed(error)

    def _run(self, work: Work[Operation]) -> Value:
        request = work.request
        match request:
            case CreateModelRequest():
                return self._create(work)
            case LoadWeightsRequest() if work.seq_id == 0:
                return self._create_from_checkpoint(work, request)
        run = self.live.get(work.run_id)
        if run is None:
            raise _not_live(work.run_id)
        match request:
            case OptimStepRequest():
                run.version += 1
                metrics = run.base.trainer.optim_step(run.state, request.adam_params or AdamParams())
                return OptimStepResponse(metrics=metrics)
            case SaveWeightsRequest():
                return self._save(run, request)
            case SaveWeightsForSamplerRequest():
                return self._save_for_sampler(run, request)
            case LoadWeightsRequest():
                return self._load(run, request)
            case UnloadModelRequest():
                del self.live[run.run_id]
                return UnloadModelResponse(model_id=run.run_id)
        raise EngineFailure(f"no operation is called {work.kind}")

    def _create(self, work: Work[Operation]) -> Value:
        row = self._row(work.run_id)
        if row.lora is None:
            raise InvalidInput("create_model needs a lora_config; this server trains LoRA adapters.")
        base = self._ready_base(row.base_model)
        self.live[row.run_id] = LiveRun(row.run_id, base, base.trainer.create(row.lora))
        self._store.runs.made_live(row.run_id, row.base_model, row.lora)
        return CreateModelResponse(model_id=row.run_id)

    def _create_from_checkpoint(self, work: Work[Operation], request: LoadWeightsRequest) -> Value:
        row = self._row(work.run_id)
        checkpoint = find_checkpoint(self._store, row.owner, request.path)
        base = self._ready_base(row.base_model)
        run = LiveRun(row.run_id, base, base.trainer.create(checkpoint.lora))
        self._load_into(run, checkpoint, optimizer=request.optimizer)
        self.live[row.run_id] = run
        self._store.runs.made_live(row.run_id, row.base_model, checkpoint.lora)
        return LoadWeightsResponse(path=request.path, model_id=row.run_id)

    def _load(self, run: LiveRun, request: LoadWeightsRequest) -> Value:
        checkpoint = find_checkpoint(self._store, self._row(run.run_id).owner, request.path)
        self._load_into(run, checkpoint, optimizer=request.optimizer)
        return LoadWeightsResponse(path=request.path, model_id=run.run_id)

    def _load_into(self, run: LiveRun, checkpoint: CheckpointRow, *, optimizer: bool) -> None:
        run.version += 1
        directory = self._store.directories.resolve(checkpoint.directory)
        run.base.trainer.load(run.state, directory, optimizer=optimizer)

    def _save(self, run: LiveRun, request: SaveWeightsRequest) -> Value:
        assert request.path is not None, "admission refuses a save without a name"
        row = self._row(run.run_id)
        check_free(self._store, run.run_id, CheckpointKind.WEIGHTS, request.path, overwrite=request.overwrite)
        with self._store.directories.checkpoint(run.run_id, CheckpointKind.WEIGHTS, request.path) as writing:
            run.base.trainer.save(run.state, writing.temporary, row.base_model, optimizer=True)
        checkpoint = _checkpoint(row, CheckpointKind.WEIGHTS, request, writing.final, writing.size_bytes)
        self._record(checkpoint)
        return SaveWeightsResponse(path=checkpoint.path)

    def _save_for_sampler(self, run: LiveRun, request: SaveWeightsForSamplerRequest) -> Value:
        row = self._row(run.run_id)
        adapter = run.base.trainer.snapshot(run.state)
        if request.path is None:
            return self._snapshot(run, row, request)
        check_free(self._store, run.run_id, CheckpointKind.SAMPLER_WEIGHTS, request.path, overwrite=False)
        with self._store.directories.checkpoint(
            run.run_id, CheckpointKind.SAMPLER_WEIGHTS, request.path
        ) as writing:
            run.base.trainer.save(run.state, writing.temporary, row.base_model, optimizer=False)
        checkpoint = _checkpoint(
            row, CheckpointKind.SAMPLER_WEIGHTS, request, writing.final, writing.size_bytes
        )
        self._record(checkpoint)
        self._snapshots.put(writing.final, adapter)
        return SaveWeightsForSamplerResponse(path=checkpoint.path)

    def _snapshot(self, run: LiveRun, row: RunRow, request: SaveWeightsForSamplerRequest) -> Value:
        from tinkex.engine.model.adapter_files import save_adapter

        sampler_id = f"{row.session_id}:sample:{request.sampling_session_seq_id}"
        if self._store.samplers.get(sampler_id) is not None:
            raise InvalidInput(
                f"sampling_session_seq_id {request.sampling_session_seq_id} of this session is in use already."
            )
        adapter = run.base.trainer.snapshot(run.state)
        if run.snapshot is None or run.snapshot[0] != run.version:
            with self._store.directories.snapshot() as writing:
                save_adapter(writing.temporary, adapter, row.base_model)
            run.snapshot = (run.version, writing.final)
            self._snapshots.put(writing.final, adapter)
        sampler = SamplerRow(
            sampler_id=sampler_id,
            session_id=row.session_id,
            owner=row.owner,
            base_model=row.base_model,
            created_at=time.time(),
            directory=run.snapshot[1],
        )
        self._store.samplers.add(sampler)
        return SaveWeightsForSamplerResponse(sampling_session_id=sampler_id)

    def _record(self, checkpoint: CheckpointRow) -> None:
        replaced = self._store.checkpoints.put(checkpoint)
        if replaced is not None:
            self._snapshots.drop(replaced)
            self._store.directories.remove(replaced)

    def _row(self, run_id: str) -> RunRow:
        row = self._store.runs.get(run_id)
        if row is None:
            raise UnknownObject(f"there is no run {run_id}.")
        return row

    def _ready_base(self, name: str) -> Base:
        base = self._models.find(name)
        try:
            base.load()
        except SetupError as error:
            raise ModelUnavailable(f"the model {name} cannot be loaded: {error}") from error
        return base


def _checkpoint(
    row: RunRow,
    kind: CheckpointKind,
    request: SaveWeightsRequest | SaveWeightsForSamplerRequest,
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
        user_metadata=request.user_metadata,
    )


def _not_live(run_id: str) -> TinkexError:
    return ModelUnavailable(
        f"the weights of run {run_id} are not in memory; create it again from its last checkpoint."
    )
