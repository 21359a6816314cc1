"""Admission: everything that can be rejected is rejected here, before it is durable.

A rejected submission has changed nothing, except that its number is used up: the client has moved on to the next. An
accepted one is in the journal, with its whole request, before its request_id is returned. Submitting the same number
again returns the same request_id.
"""

from __future__ import annotations

import logging
import secrets
import sqlite3
import time
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import msgspec

from tinkex._wire import json as wire_json
from tinkex.engine.config import EngineConfig
from tinkex.engine.encoding import body_size, encode_request, succeeded
from tinkex.engine.health import Health
from tinkex.engine.intake.checks import ADAM, Checks, check_context, count_tokens
from tinkex.engine.intake.fingerprint import fingerprint
from tinkex.engine.integrity import CheckpointIntegrity
from tinkex.engine.log_limit import LogLimit
from tinkex.engine.lookup import (
    find_live_run,
    find_run,
    find_session,
    new_sampler,
    resolve_sampler,
    sequence_ids,
)
from tinkex.engine.operation import Kind, Operation, OperationRequest, RunRequest
from tinkex.engine.passes import digest_of, find_custom_loss, read_job
from tinkex.engine.quotas import Quotas
from tinkex.engine.running.crashes import CrashTracker
from tinkex.engine.running.table import OperationTable
from tinkex.engine.served_models import ServedModels
from tinkex.engine.store import (
    FutureRow,
    FutureStatus,
    JournalRow,
    LossRow,
    RunRow,
    RunStatus,
    SamplerRow,
    Store,
)
from tinkex.engine.trainer.prefixes import count_distinct
from tinkex.errors import Busy, Conflict, EngineError, InvalidInput, StorageUnavailable, Unsupported
from tinkex.types import (
    CreateCustomLossRequest,
    CreateCustomLossResponse,
    CreateModelRequest,
    CreateSamplingSessionRequest,
    ForwardBackwardRequest,
    LoadWeightsRequest,
    LoraConfig,
    SampleRequest,
    UnloadModelRequest,
    UntypedAPIFuture,
)

logger = logging.getLogger("tinkex.engine")

SUBJECT = "submissions"
DEFAULT_MAX_TOKENS = 1024
"""The assumed cost of a sample without max_tokens, or on a model that is not loaded yet, for fair shares."""
HELD_PER_BYTE = 8
"""About how much memory a decoded request takes for each byte of its encoded form."""
CREATE_LOSS = "create_custom_loss"
UNNUMBERED = 0
"""The seq_id of a pass whose client does not number its operations (protobuf cannot tell 0 from absent)."""

TOUCH_INTERVAL_S = 60.0

Submission: TypeAlias = OperationRequest | CreateCustomLossRequest


class Arrival(NamedTuple):
    """A request that waits to be accepted."""

    owner: str
    request: Submission
    body: bytes | None = None


class Admission:
    """Validates, numbers and records what clients submit. Safe on any thread."""

    def __init__(
        self,
        config: EngineConfig,
        store: Store,
        models: ServedModels,
        table: OperationTable,
        crashes: CrashTracker,
        health: Health,
        integrity: CheckpointIntegrity,
    ) -> None:
        self._store = store
        self._health = health
        self._models = models
        self._table = table
        self._crashes = crashes
        self._integrity = integrity
        self._checks = Checks(config, store, models, integrity)
        self._quotas = Quotas(config, store)
        self._prefix_sharing = config.prefix_sharing
        self._touched: dict[str, float] = {}
        self._recorded: list[Operation] = []
        """Operations of the current transaction; they enter the table when it is committed."""
        self._rejections = LogLimit()

    def submit(self, owner: str, request: Submission, body: bytes | None = None) -> UntypedAPIFuture:
        """Accept a request, or raise the error that says why not.

        ``body`` is the request as it is recorded, if the caller has it: protobuf for passes, JSON for the rest, or what
        :func:`~tinkex.engine.encoding.compact` makes of it.
        """
        (result,) = self.submit_all([Arrival(owner, request, body)])
        if isinstance(result, Exception):
            raise result
        return result

    def submit_all(self, arrivals: Sequence[Arrival]) -> Sequence[UntypedAPIFuture | Exception]:
        """Accept requests in one transaction; each has its answer, or the error that says why not.

        At most one of them is of the same run, and one that is neither a sample nor of a run comes alone.
        """
        failure = self._store.database.flush_failure
        if failure is not None:
            return [_cannot_record(failure) for _ in arrivals]
        # One group at a time: between looking up a number and recording it no other may use it.
        with self._table.intake_lock:
            self._recorded.clear()
            for arrival in arrivals:
                if (run_id := getattr(arrival.request, "model_id", None)) is not None:
                    self._store.runs.get(
                        run_id
                    )  # here, because nothing is cached that is read in a transaction
            try:
                with self._store.database.transaction():
                    results = [self._try_submit(arrival) for arrival in arrivals]
            except sqlite3.Error as error:
                # The commit failed, so nothing was accepted, and the numbers are still free.
                self._health.trouble(SUBJECT, f"operations cannot be recorded ({error})")
                return [_cannot_record(error) for _ in arrivals]
            now = time.monotonic()
            for operation in self._recorded:
                self._table.add(operation, now)
        self._health.fine(SUBJECT)
        return results

    def _try_submit(self, arrival: Arrival) -> UntypedAPIFuture | Exception:
        try:
            return self._submit(arrival.owner, arrival.request, arrival.body)
        except sqlite3.Error:
            raise
        except Exception as error:  # noqa: BLE001 -- raised where the answer is awaited
            if isinstance(error, Busy):
                self._log_rejection(arrival.owner, error)
            return error

    def _submit(self, owner: str, request: Submission, body: bytes | None) -> UntypedAPIFuture:
        if isinstance(request, CreateCustomLossRequest):
            return self._create_loss(owner, request)
        body = body if body is not None else encode_request(request)
        match request:
            case SampleRequest():
                return self._sample(owner, request, body)
            case CreateModelRequest():
                return self._create_run(owner, request, body)
            case LoadWeightsRequest() if request.model_id is None:
                return self._create_run(owner, request, body)
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
                self._quotas.check_room(owner)
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
        """Use up the number of a submission whose body could not be decoded, if its user may store that."""
        row = self._store.runs.get(run_id)
        if row is not None and row.owner == owner and self._quotas.has_room(owner):
            self._use_number(run_id, seq_id)

    # ---- what each kind of request has to pass

    def _create_loss(self, owner: str, request: CreateCustomLossRequest) -> UntypedAPIFuture:
        """Record a loss and its result in one commit; the same request again returns the same loss."""
        self._crashes.check_user(owner)
        self._table.check_room(owner)
        session = find_session(self._store, owner, request.session_id)
        target, seq_id = f"{session.session_id}:loss", request.custom_loss_seq_id
        duplicate = self._find_duplicate(target, seq_id, request)
        if duplicate is not None:
            return duplicate
        request_id, loss_id, now = _new_request_id(), f"{target}:{seq_id}", time.time()
        row = LossRow(loss_id, session.session_id, owner, request.name, now, wire_json.encode(request))
        self._quotas.check_room(owner, len(row.definition))
        outcome = [(request_id, succeeded(CreateCustomLossResponse(loss_id=loss_id)))]
        with self._store.database.transaction():
            self._store.losses.add(row)
            self._store.futures.accept(
                FutureRow(request_id, owner, CREATE_LOSS, target, seq_id, fingerprint(request), now)
            )
            self._store.finished.add(outcome, {}, now)
            self._store.futures.finish(outcome, now)
        return UntypedAPIFuture(request_id=request_id)

    def _create_run(
        self, owner: str, request: CreateModelRequest | LoadWeightsRequest, body: bytes
    ) -> UntypedAPIFuture:
        """Accept a new run, fresh or from a checkpoint."""
        if request.session_id is None or request.model_seq_id is None:
            raise InvalidInput(
                "load_weights needs model_id and seq_id, or session_id and model_seq_id for a new run."
            )
        session = find_session(self._store, owner, request.session_id)
        run_id = f"{session.session_id}:train:{request.model_seq_id}"
        duplicate = self._find_duplicate(run_id, 0, request)
        if duplicate is not None:
            return duplicate
        base_model = self._checks.new_run(owner, request)
        num_bytes = self._check_room(owner, body)
        now = time.time()
        row = RunRow(
            run_id=run_id,
            session_id=session.session_id,
            owner=owner,
            base_model=base_model,
            created_at=now,
            used_at=now,
            status=RunStatus.CREATING,
            lora=_with_seed(request.lora_config) if isinstance(request, CreateModelRequest) else None,
            optimizer_config=request.optimizer_config or {"type": ADAM},
            user_metadata=request.user_metadata,
        )
        model = self._models.find(base_model).source
        operation = Operation(_new_request_id(), owner, model, run_id, 0, Kind.of(request), 0, request)
        operation.num_bytes, operation.held_bytes = num_bytes, HELD_PER_BYTE * num_bytes
        with self._store.database.transaction():
            self._store.runs.add(row)
            self._record(operation, request, 0, body)
        self._recorded.append(operation)
        return UntypedAPIFuture(request_id=operation.request_id, model_id=run_id)

    def _sample(self, owner: str, request: SampleRequest, body: bytes) -> UntypedAPIFuture:
        """Accept a sample."""
        sampler = self.find_sampler(owner, request)
        # Numbers are per sampling session: without one, those of a user's programs are unrelated.
        seq_id = request.seq_id if request.sampling_session_id is not None else None
        if seq_id is not None:
            duplicate = self._find_duplicate(sampler.sampler_id, seq_id, request)
            if duplicate is not None:
                return duplicate
        num_bytes = self._check_room(owner, body)
        model = self._models.find(sampler.base_model)
        request_id = _new_request_id()
        ids = sequence_ids(request_id, self._checks.num_samples(request))
        prompt_tokens = self._checks.sample(model, request, request_id, ids)
        check_context("prompt", prompt_tokens, sampler.base_model)
        # No sequence outgrows the context, whatever max_tokens is; and no column holds any number.
        max_context = model.info.arch.max_context if model.known else DEFAULT_MAX_TOKENS
        new_tokens = min(request.sampling_params.max_tokens or DEFAULT_MAX_TOKENS, max_context)
        num_tokens = prompt_tokens + request.num_samples * new_tokens
        target = sampler.sampler_id
        operation = Operation(
            request_id, owner, model.source, target, seq_id or 0, Kind.SAMPLE, num_tokens, request
        )
        operation.num_bytes, operation.held_bytes = num_bytes, HELD_PER_BYTE * num_bytes
        with self._store.database.transaction():
            self._record(operation, request, seq_id, body)
            self._touch(sampler.session_id)
        self._recorded.append(operation)
        return UntypedAPIFuture(request_id=request_id, sample_sequence_ids=ids)

    def _operation(self, owner: str, request: RunRequest, body: bytes) -> UntypedAPIFuture:
        """Accept an operation of a run."""
        assert request.model_id is not None
        if isinstance(request, UnloadModelRequest):
            # Such requests have no number; one that failed may be sent again.
            run_id = find_run(self._store, owner, request.model_id).run_id
            known = self._store.futures.last_of(run_id, Kind.UNLOAD)
            if known is not None and known.status is not FutureStatus.FAILED:
                return UntypedAPIFuture(request_id=known.request_id, model_id=run_id)
        row = find_live_run(self._store, owner, request.model_id)
        seq_id: int | None = getattr(request, "seq_id", None)
        if seq_id is None or (isinstance(request, ForwardBackwardRequest) and seq_id == UNNUMBERED):
            seq_id = self._table.next_number(row.run_id)
        if not self._table.is_new(row.run_id, seq_id):
            duplicate = self._find_duplicate(row.run_id, seq_id, request)
            if duplicate is not None:
                return duplicate
        self._crashes.check_user(owner)
        num_bytes = body_size(body)
        self._table.check_room(owner, num_bytes, row.run_id, seq_id, self._recorded)
        if not isinstance(request, UnloadModelRequest):  # which frees space
            self._quotas.check_room(owner, len(body))
        job, loss, num_datums, num_tokens = None, None, 0, 0
        try:
            model = self._models.find(row.base_model)
            if isinstance(request, ForwardBackwardRequest):
                if model.known:
                    job = read_job(self._store, owner, row.run_id, request, model.info)
                    loss = digest_of(job.custom_loss)
                else:  # it is read when it runs
                    loss = digest_of(find_custom_loss(self._store, owner, request))
                self._crashes.check_loss(loss)
                num_datums = len(request.data)
                lengths = [count_tokens(datum.model_input) for datum in request.data]
                num_tokens = sum(lengths)
                for index, length in enumerate(lengths):
                    check_context(f"data[{index}].model_input", length, row.base_model)
            else:
                self._checks.operation(owner, row, request)
            self._table.check_number(row.run_id, seq_id)
        except EngineError as error:
            if _is_final(error):
                self._use_number(row.run_id, seq_id)
            raise
        kind = Kind.of(request)
        operation = Operation(_new_request_id(), owner, model.source, row.run_id, seq_id, kind, num_tokens)
        operation.num_bytes, operation.loss, operation.num_datums = num_bytes, loss, num_datums
        if job is not None:
            operation.job, operation.held_bytes = job, job.num_bytes
            if self._prefix_sharing:
                operation.tokens_computed = count_distinct([example.tokens_N for example in job.examples])
        else:
            operation.request, operation.held_bytes = request, HELD_PER_BYTE * num_bytes
        with self._store.database.transaction():
            self._record(operation, request, seq_id, body)
            self._store.runs.mark_used(row.run_id, time.time())
            self._touch(row.session_id)
        self._recorded.append(operation)
        return UntypedAPIFuture(request_id=operation.request_id, model_id=row.run_id)

    def _check_room(self, owner: str, body: bytes) -> int:
        """The size of a request, in memory; raises if there is no room for it."""
        self._crashes.check_user(owner)
        num_bytes = body_size(body)
        self._table.check_room(owner, num_bytes, also=self._recorded)
        self._quotas.check_room(owner, len(body))
        return num_bytes

    # ---- records

    def _find_duplicate(self, target: str, seq_id: int, request: Submission) -> UntypedAPIFuture | None:
        """The answer to an earlier request with this number; raises ``InvalidInput`` if its content was different."""
        known = self._store.futures.find_by_seq_id(target, seq_id)
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

    def _record(
        self, operation: Operation, request: OperationRequest, seq_id: int | None, body: bytes
    ) -> None:
        """Record an operation: that of a run in the journal, a sample with its future."""
        is_sample = operation.kind is Kind.SAMPLE
        self._store.futures.accept(
            FutureRow(
                request_id=operation.request_id,
                owner=operation.owner,
                kind=operation.kind,
                target=operation.run_id,
                seq_id=seq_id,
                payload_hash=fingerprint(request),
                created_at=time.time(),
                request=body if is_sample else None,
            )
        )
        if not is_sample:
            self._store.journal.accept(
                JournalRow(
                    operation.request_id,
                    operation.run_id,
                    operation.seq_id,
                    operation.owner,
                    operation.kind,
                    operation.num_tokens,
                    body,
                )
            )

    def _touch(self, session_id: str) -> None:
        """Record that a session is in use, once a minute at most."""
        now = time.monotonic()
        if session_id and now - self._touched.get(session_id, float("-inf")) > TOUCH_INTERVAL_S:
            self._touched[session_id] = now
            self._store.sessions.record_heartbeat(session_id, time.time())

    def _log_rejection(self, owner: str, error: Busy) -> None:
        number = self._rejections.count()
        if number:
            logger.warning("rejected %d submissions with 429; the last one, of %s: %s", number, owner, error)

    def _use_number(self, run_id: str, seq_id: int) -> None:
        if self._table.reject(run_id, seq_id, time.monotonic()):
            self._store.journal.use_number(run_id, seq_id)


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


def _new_request_id() -> str:
    """An unguessable id for a request; ids in the order of time are stored next to each other."""
    return f"req-{time.time_ns() // 1_000_000:012x}{secrets.token_hex(12)}"
