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
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tinkex.engine.config import EngineConfig
from tinkex.engine.operations.access import find_checkpoint, find_live_run, find_sampler, find_session
from tinkex.engine.operations.backlog import Backlog, Operation
from tinkex.engine.operations.bodies import decode_operation, encode_operation
from tinkex.engine.operations.checks import ADAM, Checks
from tinkex.engine.operations.execution import LiveRun
from tinkex.engine.operations.fingerprint import fingerprint
from tinkex.engine.operations.health import Health
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
    CreateModelRequest,
    CreateSamplingSessionRequest,
    ForwardBackwardRequest,
    LoadWeightsRequest,
    LoraConfig,
    OptimStepRequest,
    SampleRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
    UnloadModelRequest,
    UntypedAPIFuture,
)

logger = logging.getLogger("tinkex.engine")

SUBMISSIONS = "submissions"
TOUCH_INTERVAL_S = 60.0
UNNUMBERED = 0
"""The seq_id of a pass whose client does not number its operations (protobuf cannot tell 0 from absent)."""
DEFAULT_MAX_TOKENS = 1024
"""What a sample without max_tokens is taken to cost when turns are shared."""


class Admission:
    """Checks, numbers and records what clients submit. Safe to use from any thread."""

    def __init__(
        self,
        config: EngineConfig,
        store: Store,
        models: ServedModels,
        backlog: Backlog,
        live: Mapping[str, LiveRun],
        health: Health,
    ) -> None:
        self._store = store
        self._health = health
        self._models = models
        self._backlog = backlog
        self._checks = Checks(config, store, models, live)
        self._touched: dict[str, float] = {}
        # One submission at a time: between looking up a number and recording it nothing may come in.
        self._lock = threading.Lock()

    def submit(self, owner: str, request: Operation, body: bytes | None = None) -> UntypedAPIFuture:
        """Accept an operation, or raise the error that says why not.

        ``body`` is the request as it came in (protobuf for passes, JSON for the rest), if the caller has it.
        """
        failure = self._store.database.flush_failure
        if failure is not None:
            raise _no_storage(failure)
        with self._lock:
            self._backlog.check_room(owner)
            try:
                accepted = self._submit(owner, request, body)
            except sqlite3.Error as error:
                # The commit failed, so nothing was accepted, and the number is still free.
                self._health.trouble(SUBMISSIONS, f"operations cannot be recorded ({error})")
                raise _no_storage(error) from error
        self._health.fine(SUBMISSIONS)
        return accepted

    def _submit(self, owner: str, request: Operation, body: bytes | None) -> UntypedAPIFuture:
        match request:
            case CreateModelRequest():
                return self._create(owner, request, body)
            case LoadWeightsRequest() if request.model_id is None:
                return self._create_from_checkpoint(owner, request, body)
            case SampleRequest():
                return self._sample(owner, request, body)
            case _:
                return self._operation(owner, request, body)

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

    # ---- runs

    def _create(self, owner: str, request: CreateModelRequest, body: bytes | None) -> UntypedAPIFuture:
        session = find_session(self._store, owner, request.session_id)
        run_id = f"{session.session_id}:train:{request.model_seq_id}"
        repeated = self._repeated(run_id, 0, request)
        if repeated is not None:
            return repeated
        base = self._models.find(request.base_model)
        self._checks.new_run(base, request)
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
        repeated = self._repeated(run_id, 0, request)
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
        work = Work[Operation](_new_request_id(), row.owner, base.source, row.run_id, 0, kind, 0, request)
        with self._store.database.transaction():
            self._store.runs.add(row)
            self._record(work, row.run_id, 0, body)
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
        | LoadWeightsRequest
        | UnloadModelRequest,
        body: bytes | None,
    ) -> UntypedAPIFuture:
        assert request.model_id is not None
        row = find_live_run(self._store, owner, request.model_id)
        given: int | None = getattr(request, "seq_id", None)
        if given is None or (isinstance(request, ForwardBackwardRequest) and given == UNNUMBERED):
            given = self._backlog.expected(row.run_id)
        seq_id = given
        repeated = self._repeated(row.run_id, seq_id, request)
        if repeated is not None:
            return repeated
        try:
            num_tokens = self._checks.operation(owner, row, request)
            self._backlog.check_turn(row.run_id, seq_id)
        except EngineError as error:
            if _is_final(error):
                self._use_up(row.run_id, seq_id)
            raise
        base = self._models.find(row.base_model)
        work = Work[Operation](
            _new_request_id(), owner, base.source, row.run_id, seq_id, _kind(request), num_tokens, request
        )
        with self._store.database.transaction():
            self._record(work, row.run_id, seq_id, body)
            self._store.runs.used(row.run_id, time.time())
            self._touch(row.session_id)
        self._backlog.put(work, time.monotonic())
        return UntypedAPIFuture(request_id=work.request_id, model_id=row.run_id)

    def _use_up(self, run_id: str, seq_id: int) -> None:
        if self._backlog.refuse(run_id, seq_id, time.monotonic()):
            self._store.journal.use_number(run_id, seq_id)

    # ---- sampling

    def create_sampler(self, owner: str, request: CreateSamplingSessionRequest) -> str:
        """Make a sampler on a base model or a checkpoint; the same request again gives the same one."""
        session = find_session(self._store, owner, request.session_id)
        sampler_id = f"{session.session_id}:sample:{request.sampling_session_seq_id}"
        row = self._new_sampler(owner, sampler_id, session.session_id, request.base_model, request.model_path)
        with self._lock:
            known = self._store.samplers.get(sampler_id)
            if known is None:
                self._store.samplers.add(row)
            elif (known.base_model, known.model_path) != (row.base_model, row.model_path):
                raise InvalidInput(
                    f"sampling_session_seq_id {request.sampling_session_seq_id} of this session stands for other weights already."
                )
        return sampler_id

    def _new_sampler(
        self, owner: str, sampler_id: str, session_id: str, base_model: str | None, model_path: str | None
    ) -> SamplerRow:
        if model_path is not None:
            checkpoint = find_checkpoint(self._store, owner, model_path)
            if base_model is not None:
                self._checks.same_base(self._models.find(base_model), checkpoint, model_path)
            base_model, directory = base_model or checkpoint.base_model, checkpoint.directory
        elif base_model is not None:
            directory = None
        else:
            raise InvalidInput(
                "sampling needs a base_model or a model_path (tinker://<run>/sampler_weights/<name>)."
            )
        self._models.find(base_model)
        return SamplerRow(
            sampler_id=sampler_id,
            session_id=session_id,
            owner=owner,
            base_model=base_model,
            created_at=time.time(),
            model_path=model_path,
            directory=directory,
        )

    def _sample(self, owner: str, request: SampleRequest, body: bytes | None) -> UntypedAPIFuture:
        sampler = self.sampler_of(owner, request)
        target, seq_id = sampler.sampler_id, request.seq_id
        if seq_id is not None:
            repeated = self._repeated(target, seq_id, request)
            if repeated is not None:
                return repeated
        base = self._models.find(sampler.base_model)
        request_id = _new_request_id()
        ids = sequence_ids(request_id, self._checks.num_samples(request))
        prompt_tokens = self._checks.sample(base, request, request_id, ids)
        new_tokens = request.sampling_params.max_tokens or DEFAULT_MAX_TOKENS
        num_tokens = prompt_tokens + request.num_samples * new_tokens
        work = Work[Operation](
            request_id, owner, base.source, target, seq_id or 0, Kind.SAMPLE, num_tokens, request
        )
        with self._store.database.transaction():
            self._record(work, target, seq_id, body)
            self._touch(sampler.session_id)
        self._backlog.put_sample(work)
        return UntypedAPIFuture(request_id=request_id, sample_sequence_ids=ids)

    def sampler_of(self, owner: str, request: SampleRequest) -> SamplerRow:
        """The sampler a request names, or one made on the spot for a request that names weights itself."""
        if request.sampling_session_id is not None:
            return find_sampler(self._store, owner, request.sampling_session_id)
        return self._new_sampler(owner, f"direct:{owner}", "", request.base_model, request.model_path)

    def resume_sample(self, row: FutureRow, request: SampleRequest) -> None:
        """Put a sample that was promised before a restart back in line."""
        base = self._models.find(self.sampler_of(row.owner, request).base_model)
        work = Work[Operation](
            row.request_id, row.owner, base.source, row.target, row.seq_id or 0, Kind.SAMPLE, 1, request
        )
        self._backlog.put_sample(work)

    # ---- recording

    def _touch(self, session_id: str) -> None:
        """Count an operation as a sign of life of its session; often enough is once a minute."""
        now = time.monotonic()
        if session_id and now - self._touched.get(session_id, float("-inf")) > TOUCH_INTERVAL_S:
            self._touched[session_id] = now
            self._store.sessions.seen(session_id, time.time())

    def _repeated(self, target: str, seq_id: int, request: Any) -> UntypedAPIFuture | None:
        """The answer given before, if this number was accepted with the same content."""
        known = self._store.futures.at_turn(target, seq_id)
        if known is None:
            return None
        if known.payload_hash != fingerprint(request):
            raise InvalidInput(
                f"number {seq_id} of {target} was already used by another {known.kind} request with other content; "
                "number operations one by one, and send a retry unchanged."
            )
        if isinstance(request, SampleRequest):
            ids = sequence_ids(known.request_id, request.num_samples)
            return UntypedAPIFuture(request_id=known.request_id, sample_sequence_ids=ids)
        return UntypedAPIFuture(request_id=known.request_id, model_id=target)

    def _record(self, work: Work[Operation], target: str, seq_id: int | None, body: bytes | None) -> None:
        kept = body if body is not None else encode_operation(work.request)
        is_sample = work.kind is Kind.SAMPLE
        row = FutureRow(
            request_id=work.request_id,
            owner=work.tenant,
            kind=work.kind,
            target=target,
            seq_id=seq_id,
            payload_hash=fingerprint(work.request),
            created_at=time.time(),
            request=kept if is_sample else None,
        )
        self._store.futures.accept(row)
        if not is_sample:
            self._store.journal.accept(
                JournalRow(
                    work.request_id, target, work.seq_id, work.tenant, work.kind, work.num_tokens, kept
                )
            )


def sequence_ids(request_id: str, num_samples: int) -> list[str]:
    """The ids of the sequences a sample will return.

    >>> sequence_ids("req-1", 2)
    ['req-1:0', 'req-1:1']
    """
    return [f"{request_id}:{number}" for number in range(num_samples)]


def _new_request_id() -> str:
    return f"req-{secrets.token_hex(12)}"


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
        case LoadWeightsRequest():
            return Kind.LOAD
        case UnloadModelRequest():
            return Kind.UNLOAD
        case CreateModelRequest():
            return Kind.CREATE
        case SampleRequest():
            return Kind.SAMPLE
