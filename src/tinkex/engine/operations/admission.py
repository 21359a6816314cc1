"""Accepting operations: everything that can be refused is refused here, before anything is promised.

A refused submission has changed nothing, except that its number is used up: the client has moved on to the next. An
accepted one is in the journal, with its whole request, before its request_id is returned. Submitting the same number
again gives the same request_id.
"""

from __future__ import annotations

import logging
import secrets
import sqlite3
import threading
import time
from collections.abc import Sequence

import msgspec

from tinkex.engine.config import EngineConfig
from tinkex.engine.operations.access import find_live_run, find_run, find_session
from tinkex.engine.operations.backlog import Backlog, Operation
from tinkex.engine.operations.bodies import decode_operation
from tinkex.engine.operations.checks import ADAM, Checks
from tinkex.engine.operations.health import Health
from tinkex.engine.operations.intact import Intact
from tinkex.engine.operations.losses import CustomLosses
from tinkex.engine.operations.promises import Promises, new_request_id
from tinkex.engine.operations.samplers import SamplerAdmission
from tinkex.engine.operations.served import Base, ServedModels
from tinkex.engine.scheduler import Kind, Work
from tinkex.engine.store import (
    FutureRow,
    JournalRow,
    RunRow,
    RunStatus,
    SamplerRow,
    Store,
)
from tinkex.errors import (
    Busy,
    Conflict,
    EngineError,
    InvalidInput,
    StorageUnavailable,
    UnknownObject,
    Unsupported,
)
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

logger = logging.getLogger("tinkex.engine")

SUBMISSIONS = "submissions"
UNNUMBERED = 0
"""The seq_id of a pass whose client does not number its operations (protobuf cannot tell 0 from absent)."""


class Admission:
    """Checks, numbers and records what clients submit. Safe to use from any thread."""

    def __init__(
        self,
        config: EngineConfig,
        store: Store,
        models: ServedModels,
        backlog: Backlog,
        health: Health,
        losses: CustomLosses,
    ) -> None:
        self._store = store
        self._health = health
        self._models = models
        self._backlog = backlog
        self._losses = losses
        self.intact = Intact(store, health)
        self._checks = Checks(config, store, models, losses, self.intact)
        self._promises = Promises(store)
        self._samplers = SamplerAdmission(store, models, backlog, self._checks, self._promises)
        # One submission at a time: between looking up a number and recording it nothing may come in.
        self._lock = threading.Lock()

    def submit(
        self, owner: str, request: Operation | CreateCustomLossRequest, body: bytes | None = None
    ) -> UntypedAPIFuture:
        """Accept an operation, or raise the error that says why not.

        ``body`` is the request as it came in (protobuf for passes, JSON for the rest), if the caller has it.
        """
        failure = self._store.database.flush_failure
        if failure is not None:
            raise _no_storage(failure)
        with self._lock:
            try:
                accepted = self._submit(owner, request, body)
            except sqlite3.Error as error:
                # The commit failed, so nothing was accepted, and the number is still free.
                self._health.trouble(SUBMISSIONS, f"operations cannot be recorded ({error})")
                raise _no_storage(error) from error
        self._health.fine(SUBMISSIONS)
        return accepted

    def _submit(
        self, owner: str, request: Operation | CreateCustomLossRequest, body: bytes | None
    ) -> UntypedAPIFuture:
        match request:
            case CreateCustomLossRequest():
                self._backlog.check_room(owner)
                return self._losses.create(owner, request, self._promises)
            case CreateModelRequest():
                return self._create(owner, request, body)
            case LoadWeightsRequest() if request.model_id is None:
                return self._create_from_checkpoint(owner, request, body)
            case SampleRequest():
                return self._samplers.sample(owner, request, body)
            case _:
                return self._operation(owner, request, body)

    def create_sampler(self, owner: str, request: CreateSamplingSessionRequest) -> str:
        """Make a sampler on a base model or a checkpoint; the same request again gives the same one."""
        with self._lock:
            return self._samplers.create(owner, request)

    def sampler_of(self, owner: str, request: SampleRequest) -> SamplerRow:
        """The sampler a request names, or one made on the spot for a request that names weights itself."""
        return self._samplers.find(owner, request)

    def refuse(self, owner: str, run_id: str, seq_id: int) -> None:
        """Use up the number of a submission whose body could not be read."""
        row = self._store.runs.get(run_id)
        if row is not None and row.owner == owner:
            self._use_up(run_id, seq_id)

    def close_run(self, run_id: str, status: RunStatus) -> Sequence[Work[Operation]]:
        """Take no more operations of a run; returns those that were accepted and will not run."""
        with self._lock:
            self._store.runs.set_status(run_id, status)
            return self._backlog.close(run_id)

    # ---- after a restart

    def resume_run(self, row: RunRow, next_seq: int, pending: Sequence[JournalRow]) -> None:
        """Put a run back in line with what was promised; ``ValueError`` if a request cannot be read."""
        requests = [(entry, decode_operation(Kind(entry.kind), entry.body)) for entry in pending]
        try:
            source = self._models.find(row.base_model).source
        except UnknownObject:
            logger.warning("run %s waits: its model %s is not served now", row.run_id, row.base_model)
            source, requests = "", []
        works = [
            Work[Operation](
                entry.request_id,
                entry.owner,
                source,
                row.run_id,
                entry.seq_id,
                Kind(entry.kind),
                entry.num_tokens,
                request,
            )
            for entry, request in requests
        ]
        used = self._store.journal.used_numbers(row.run_id)
        self._backlog.resume(row.run_id, next_seq, used, works, time.monotonic())

    def resume_sample(self, row: FutureRow, request: SampleRequest) -> None:
        """Put a sample that was promised before a restart back in line."""
        self._samplers.resume(row, request)

    # ---- runs

    def _create(self, owner: str, request: CreateModelRequest, body: bytes | None) -> UntypedAPIFuture:
        session = find_session(self._store, owner, request.session_id)
        run_id = f"{session.session_id}:train:{request.model_seq_id}"
        repeated = self._promises.repeated(run_id, 0, request)
        if repeated is not None:
            return repeated
        base = self._models.find(request.base_model)
        self._checks.new_run(owner, request)
        row = self._new_run(run_id, session.session_id, owner, request.base_model, request)
        return self._open(row, request, body, Kind.CREATE, base)

    def _create_from_checkpoint(
        self, owner: str, request: LoadWeightsRequest, body: bytes | None
    ) -> UntypedAPIFuture:
        if request.session_id is None or request.model_seq_id is None:
            raise InvalidInput(
                "load_weights needs model_id and seq_id, or session_id and model_seq_id for a new run."
            )
        session = find_session(self._store, owner, request.session_id)
        run_id = f"{session.session_id}:train:{request.model_seq_id}"
        repeated = self._promises.repeated(run_id, 0, request)
        if repeated is not None:
            return repeated
        checkpoint = self._checks.new_run_from_checkpoint(owner, request)
        base_model = request.base_model or checkpoint.base_model
        base = self._models.find(base_model)
        row = self._new_run(run_id, session.session_id, owner, base_model, request)
        return self._open(row, request, body, Kind.LOAD, base)

    def _new_run(
        self,
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

    def _open(
        self, row: RunRow, request: Operation, body: bytes | None, kind: Kind, base: Base
    ) -> UntypedAPIFuture:
        self._backlog.check_room(row.owner)
        work = Work[Operation](new_request_id(), row.owner, base.source, row.run_id, 0, kind, 0, request)
        with self._store.database.transaction():
            self._store.runs.add(row)
            self._promises.record(work, row.run_id, 0, body)
        self._backlog.open(row.run_id, work)
        return UntypedAPIFuture(request_id=work.request_id, model_id=row.run_id)

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
            # It has no number by which a repeated one is known; a run ends once.
            ended = self._promises.made(find_run(self._store, owner, request.model_id).run_id, Kind.UNLOAD)
            if ended is not None:
                return ended
        row = find_live_run(self._store, owner, request.model_id)
        given: int | None = getattr(request, "seq_id", None)
        if given is None or (isinstance(request, ForwardBackwardRequest) and given == UNNUMBERED):
            given = self._backlog.expected(row.run_id)
        seq_id = given
        repeated = self._promises.repeated(row.run_id, seq_id, request)
        if repeated is not None:
            return repeated
        self._backlog.check_room(owner, row.run_id, seq_id)
        try:
            num_tokens = self._checks.operation(owner, row, request)
            self._backlog.check_turn(row.run_id, seq_id)
        except EngineError as error:
            if _is_final(error):
                self._use_up(row.run_id, seq_id)
            raise
        base = self._models.find(row.base_model)
        work = Work[Operation](
            new_request_id(), owner, base.source, row.run_id, seq_id, _kind(request), num_tokens, request
        )
        with self._store.database.transaction():
            self._promises.record(work, row.run_id, seq_id, body)
            self._store.runs.used(row.run_id, time.time())
            self._promises.touch(row.session_id)
        self._backlog.put(work, time.monotonic())
        return UntypedAPIFuture(request_id=work.request_id, model_id=row.run_id)

    def _use_up(self, run_id: str, seq_id: int) -> None:
        if self._backlog.refuse(run_id, seq_id, time.monotonic()):
            self._store.journal.use_number(run_id, seq_id)


def _with_seed(lora: LoraConfig | None) -> LoraConfig | None:
    """The configuration with a seed: one drawn here is recorded, so a replay starts from the same weights."""
    if lora is None or lora.seed is not None:
        return lora
    return msgspec.structs.replace(lora, seed=secrets.randbits(31))


def _no_storage(error: Exception) -> StorageUnavailable:
    return StorageUnavailable(
        f"the server cannot record operations now ({error}), so it accepts none; nothing was changed. Free disk space or close "
        "what holds its database, then submit again."
    )


def _is_final(error: EngineError) -> bool:
    """Whether the client will go on to its next number instead of sending this one again."""
    return not isinstance(error, Busy | Conflict) and (
        400 <= error.status < 500 or isinstance(error, Unsupported)
    )


def _kind(request: Operation) -> Kind:
    match request:
        case ForwardBackwardRequest():
            return Kind.FORWARD if request.forward_only else Kind.FORWARD_BACKWARD
        case OptimStepRequest():
            return Kind.OPTIM_STEP
        case SaveWeightsRequest():
            return Kind.SAVE
        case SaveWeightsForSamplerRequest():
            return Kind.SAVE_FOR_SAMPLER
        case SaveWeightsExternalRequest():
            return Kind.SAVE_EXTERNAL
        case LoadWeightsRequest():
            return Kind.LOAD
        case UnloadModelRequest():
            return Kind.UNLOAD
        case CreateModelRequest():
            return Kind.CREATE
        case SampleRequest():
            return Kind.SAMPLE
