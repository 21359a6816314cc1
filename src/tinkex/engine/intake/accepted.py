"""Accepted requests: recorded before their ids are returned, and found again when a client repeats them."""

from __future__ import annotations

import secrets
import time

from tinkex.engine.encoding import encode_request
from tinkex.engine.intake.fingerprint import fingerprint
from tinkex.engine.lookup import sequence_ids
from tinkex.engine.operation import Kind, Operation, OperationRequest
from tinkex.engine.store import FutureRow, FutureStatus, JournalRow, Store
from tinkex.errors import InvalidInput
from tinkex.types import CreateCustomLossRequest, SampleRequest, UntypedAPIFuture

TOUCH_INTERVAL_S = 60.0


class AcceptedRequests:
    """Records requests, and answers repeated ones as before. Called with the intake lock held."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._touched: dict[str, float] = {}

    def touch(self, session_id: str) -> None:
        """Record that a session is in use, once a minute at most."""
        now = time.monotonic()
        if session_id and now - self._touched.get(session_id, float("-inf")) > TOUCH_INTERVAL_S:
            self._touched[session_id] = now
            self._store.sessions.record_heartbeat(session_id, time.time())

    def find_duplicate(
        self, target: str, seq_id: int, request: OperationRequest | CreateCustomLossRequest
    ) -> UntypedAPIFuture | None:
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

    def find_unload(self, run_id: str) -> UntypedAPIFuture | None:
        """The answer to an earlier request to unload a run, unless it failed; such requests have no number."""
        known = self._store.futures.last_of(run_id, Kind.UNLOAD)
        if known is None or known.status is FutureStatus.FAILED:
            return None
        return UntypedAPIFuture(request_id=known.request_id, model_id=run_id)

    def record(self, operation: Operation, seq_id: int | None, body: bytes | None) -> None:
        """Record an operation; ``body`` is the request as it was received, if the caller has it."""
        assert operation.request is not None
        recorded = body if body is not None else encode_request(operation.request)
        is_sample = operation.kind is Kind.SAMPLE
        self._store.futures.accept(
            FutureRow(
                request_id=operation.request_id,
                owner=operation.owner,
                kind=operation.kind,
                target=operation.run_id,
                seq_id=seq_id,
                payload_hash=fingerprint(operation.request),
                created_at=time.time(),
                request=recorded if is_sample else None,
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
                    recorded,
                )
            )


def new_request_id() -> str:
    """An id for a request that nobody can guess."""
    return f"req-{secrets.token_hex(12)}"
