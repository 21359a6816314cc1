"""Admission: everything that can be rejected is rejected here, before it is durable.

A rejected submission has changed nothing, except that its number is used up: the client has moved on to the next. An
accepted one is in the journal, with its whole request, before its request_id is returned. Submitting the same number
again returns the same request_id.
"""

from __future__ import annotations

import secrets
import sqlite3
import time

import msgspec

from tinkex.engine.config import EngineConfig
from tinkex.engine.health import Health
from tinkex.engine.intake.accepted import AcceptedRequests, new_request_id
from tinkex.engine.intake.checks import ADAM, Checks, count_tokens
from tinkex.engine.intake.custom_losses import create_custom_loss
from tinkex.engine.integrity import CheckpointIntegrity
from tinkex.engine.lookup import (
    find_live_run,
    find_run,
    find_session,
    new_sampler,
    resolve_sampler,
    sequence_ids,
)
from tinkex.engine.operation import Kind, Operation, OperationRequest
from tinkex.engine.running.table import OperationTable
from tinkex.engine.served_models import ServedModels
from tinkex.engine.store import RunRow, RunStatus, SamplerRow, Store
from tinkex.errors import Busy, Conflict, EngineError, InvalidInput, StorageUnavailable, Unsupported
from tinkex.types import (
    CreateCustomLossRequest,
    CreateModelRequest,
    CreateSamplingSessionRequest,
    ForwardBackwardRequest,
    LoadWeightsRequest,
    LoraConfig,
    OptimStepRequest,
    SampleRequest,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
    UnloadModelRequest,
    UntypedAPIFuture,
)

SUBJECT = "submissions"
DEFAULT_MAX_TOKENS = 1024
"""The assumed cost of a sample without max_tokens, or on a model that is not loaded yet, for fair shares."""
UNNUMBERED = 0
"""The seq_id of a pass whose client does not number its operations (protobuf cannot tell 0 from absent)."""


class Admission:
    """Validates, numbers and records what clients submit. Safe on any thread."""

    def __init__(
        self,
        config: EngineConfig,
        store: Store,
        models: ServedModels,
        table: OperationTable,
        health: Health,
        integrity: CheckpointIntegrity,
    ) -> None:
        self._store = store
        self._health = health
        self._models = models
        self._table = table
        self._integrity = integrity
        self._checks = Checks(config, store, models, integrity)
        self._accepted = AcceptedRequests(store)

    def submit(
        self, owner: str, request: OperationRequest | CreateCustomLossRequest, body: bytes | None = None
    ) -> UntypedAPIFuture:
        """Accept a request, or raise the error that says why not.

        ``body`` is the request as it was received (protobuf for passes, JSON for the rest), if the caller has it.
        """
        failure = self._store.database.flush_failure
        if failure is not None:
            raise _cannot_record(failure)
        # One submission at a time: between looking up a number and recording it no other may use it.
        with self._table.intake_lock:
            try:
                accepted = self._submit(owner, request, body)
            except sqlite3.Error as error:
                # The commit failed, so nothing was accepted, and the number is still free.
                self._health.trouble(SUBJECT, f"operations cannot be recorded ({error})")
                raise _cannot_record(error) from error
        self._health.fine(SUBJECT)
        return accepted

    def _submit(
        self, owner: str, request: OperationRequest | CreateCustomLossRequest, body: bytes | None
    ) -> UntypedAPIFuture:
        match request:
            case CreateCustomLossRequest():
                self._table.check_room(owner)
                return create_custom_loss(self._store, self._accepted, owner, request)
            case CreateModelRequest():
                return self._create(owner, request, body)
            case LoadWeightsRequest() if request.model_id is None:
                return self._create_from_checkpoint(owner, request, body)
            case SampleRequest():
                return self._sample(owner, request, body)
            case _:
                return self._operation(owner, request, body)

    def create_sampler(self, owner: str, request: CreateSamplingSessionRequest) -> str:
        """Create a sampler on a base model or a checkpoint; the same request again returns the same one."""
        with self._table.intake_lock:
            session = find_session(self._store, owner, request.session_id)
            sampler_id = f"{session.session_id}:sample:{request.sampling_session_seq_id}"
            row = new_sampler(
                self._store,
                self._models,
                self._integrity,
                owner,
                sampler_id,
                session.session_id,
                request.base_model,
                request.model_path,
            )
            known = self._store.samplers.get(sampler_id)
            if known is None:
                self._store.samplers.add(row)
            elif (known.base_model, known.model_path) != (row.base_model, row.model_path):
                raise InvalidInput(
                    f"sampling_session_seq_id {request.sampling_session_seq_id} of this session is used for other weights."
                )
            return sampler_id

    def find_sampler(self, owner: str, request: SampleRequest) -> SamplerRow:
        """The sampler that a request names, or a temporary one for a request that names weights itself."""
        return resolve_sampler(self._store, self._models, self._integrity, owner, request)

    def reject(self, owner: str, run_id: str, seq_id: int) -> None:
        """Use up the number of a submission whose body could not be decoded."""
        row = self._store.runs.get(run_id)
        if row is not None and row.owner == owner:
            self._use_number(run_id, seq_id)

    # ---- runs

    def _create(self, owner: str, request: CreateModelRequest, body: bytes | None) -> UntypedAPIFuture:
        session = find_session(self._store, owner, request.session_id)
        run_id = f"{session.session_id}:train:{request.model_seq_id}"
        duplicate = self._accepted.find_duplicate(run_id, 0, request)
        if duplicate is not None:
            return duplicate
        self._models.find(request.base_model)
        self._checks.new_run(owner, request)
        row = _run_row(run_id, session.session_id, owner, request.base_model, request)
        return self._open(row, request, body)

    def _create_from_checkpoint(
        self, owner: str, request: LoadWeightsRequest, body: bytes | None
    ) -> UntypedAPIFuture:
        if request.session_id is None or request.model_seq_id is None:
            raise InvalidInput(
                "load_weights needs model_id and seq_id, or session_id and model_seq_id for a new run."
            )
        session = find_session(self._store, owner, request.session_id)
        run_id = f"{session.session_id}:train:{request.model_seq_id}"
        duplicate = self._accepted.find_duplicate(run_id, 0, request)
        if duplicate is not None:
            return duplicate
        checkpoint = self._checks.new_run_from_checkpoint(owner, request)
        base_model = request.base_model or checkpoint.base_model
        row = _run_row(run_id, session.session_id, owner, base_model, request)
        return self._open(row, request, body)

    def _open(
        self, row: RunRow, request: CreateModelRequest | LoadWeightsRequest, body: bytes | None
    ) -> UntypedAPIFuture:
        self._table.check_room(row.owner)
        model = self._models.find(row.base_model)
        operation = Operation(
            new_request_id(), row.owner, model.source, row.run_id, 0, Kind.of(request), 0, request
        )
        with self._store.database.transaction():
            self._store.runs.add(row)
            self._accepted.record(operation, 0, body)
        self._table.open_run(row.run_id, operation)
        return UntypedAPIFuture(request_id=operation.request_id, model_id=row.run_id)

    # ---- samples

    def _sample(self, owner: str, request: SampleRequest, body: bytes | None) -> UntypedAPIFuture:
        """Accept a sample, or raise why not."""
        sampler = self.find_sampler(owner, request)
        # Numbers are per sampling session: without one, those of a user's programs are unrelated.
        seq_id = request.seq_id if request.sampling_session_id is not None else None
        if seq_id is not None:
            duplicate = self._accepted.find_duplicate(sampler.sampler_id, seq_id, request)
            if duplicate is not None:
                return duplicate
        self._table.check_room(owner)
        model = self._models.find(sampler.base_model)
        request_id = new_request_id()
        ids = sequence_ids(request_id, self._checks.num_samples(request))
        prompt_tokens = self._checks.sample(model, request, request_id, ids)
        # No sequence outgrows the context, whatever max_tokens is; and no column holds any number.
        max_context = model.info.arch.max_context if model.known else DEFAULT_MAX_TOKENS
        new_tokens = min(request.sampling_params.max_tokens or DEFAULT_MAX_TOKENS, max_context)
        num_tokens = prompt_tokens + request.num_samples * new_tokens
        operation = Operation(
            request_id,
            owner,
            model.source,
            sampler.sampler_id,
            seq_id or 0,
            Kind.SAMPLE,
            num_tokens,
            request,
        )
        with self._store.database.transaction():
            self._accepted.record(operation, seq_id, body)
            self._accepted.touch(sampler.session_id)
        self._table.add_sample(operation)
        return UntypedAPIFuture(request_id=request_id, sample_sequence_ids=ids)

    # ---- operations of a run

    def _operation(
        self,
        owner: str,
        request: ForwardBackwardRequest
        | OptimStepRequest
        | SaveWeightsRequest
        | SaveWeightsForSamplerRequest
        | SaveWeightsExternalRequest
        | LoadWeightsRequest
        | UnloadModelRequest,
        body: bytes | None,
    ) -> UntypedAPIFuture:
        assert request.model_id is not None
        if isinstance(request, UnloadModelRequest):
            unloaded = self._accepted.find_unload(find_run(self._store, owner, request.model_id).run_id)
            if unloaded is not None:
                return unloaded
        row = find_live_run(self._store, owner, request.model_id)
        seq_id: int | None = getattr(request, "seq_id", None)
        if seq_id is None or (isinstance(request, ForwardBackwardRequest) and seq_id == UNNUMBERED):
            seq_id = self._table.next_number(row.run_id)
        duplicate = self._accepted.find_duplicate(row.run_id, seq_id, request)
        if duplicate is not None:
            return duplicate
        self._table.check_room(owner, row.run_id, seq_id)
        try:
            job, num_tokens = None, 0
            if isinstance(request, ForwardBackwardRequest):
                job = self._checks.read_pass(row, request)
                num_tokens = sum(count_tokens(datum.model_input) for datum in request.data)
            else:
                self._checks.operation(owner, row, request)
            self._table.check_number(row.run_id, seq_id)
        except EngineError as error:
            if _is_final(error):
                self._use_number(row.run_id, seq_id)
            raise
        model = self._models.find(row.base_model)
        operation = Operation(
            new_request_id(), owner, model.source, row.run_id, seq_id, Kind.of(request), num_tokens, request
        )
        with self._store.database.transaction():
            self._accepted.record(operation, seq_id, body)
            self._store.runs.mark_used(row.run_id, time.time())
            self._accepted.touch(row.session_id)
        if job is not None:
            operation.job, operation.request = job, None  # the body is on disk
        self._table.add(operation, time.monotonic())
        return UntypedAPIFuture(request_id=operation.request_id, model_id=row.run_id)

    def _use_number(self, run_id: str, seq_id: int) -> None:
        if self._table.reject(run_id, seq_id, time.monotonic()):
            self._store.journal.use_number(run_id, seq_id)


def _run_row(
    run_id: str,
    session_id: str,
    owner: str,
    base_model: str,
    request: CreateModelRequest | LoadWeightsRequest,
) -> RunRow:
    now = time.time()
    return RunRow(
        run_id=run_id,
        session_id=session_id,
        owner=owner,
        base_model=base_model,
        created_at=now,
        used_at=now,
        status=RunStatus.CREATING,
        lora=_with_seed(request.lora_config) if isinstance(request, CreateModelRequest) else None,
        optimizer_config=request.optimizer_config or {"type": ADAM},
        user_metadata=request.user_metadata,
    )


def _with_seed(lora: LoraConfig | None) -> LoraConfig | None:
    """The configuration with a seed: one drawn here is recorded, so a replay starts from the same weights."""
    if lora is None or lora.seed is not None:
        return lora
    return msgspec.structs.replace(lora, seed=secrets.randbits(31))


def _cannot_record(error: Exception) -> StorageUnavailable:
    return StorageUnavailable(
        f"the server cannot record operations now ({error}), so it accepts none; nothing was changed. Free disk space or close "
        "what holds its database, then submit again."
    )


def _is_final(error: EngineError) -> bool:
    """Whether the client continues with its next number instead of sending this one again."""
    return not isinstance(error, Busy | Conflict) and (
        400 <= error.status < 500 or isinstance(error, Unsupported)
    )
