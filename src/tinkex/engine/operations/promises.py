"""What has been promised: accepted requests on record, found again when they are repeated."""

from __future__ import annotations

import secrets
import time
from typing import Any

from tinkex.engine.operations.backlog import Operation
from tinkex.engine.operations.bodies import encode_operation
from tinkex.engine.operations.fingerprint import fingerprint
from tinkex.engine.scheduler import Kind, Work
from tinkex.engine.store import FutureRow, FutureStatus, JournalRow, Store
from tinkex.errors import InvalidInput
from tinkex.types import SampleRequest, UntypedAPIFuture

TOUCH_INTERVAL_S = 60.0


class Promises:
    """Records requests before their ids are told to anyone. Belongs to whoever holds the lock of admission."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._touched: dict[str, float] = {}

    def touch(self, session_id: str) -> None:
        """Count an operation as a sign of life of its session; often enough is once a minute."""
        now = time.monotonic()
        if session_id and now - self._touched.get(session_id, float("-inf")) > TOUCH_INTERVAL_S:
            self._touched[session_id] = now
            self._store.sessions.seen(session_id, time.time())

    def repeated(self, target: str, seq_id: int, request: Any) -> UntypedAPIFuture | None:
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

    def made(self, target: str, kind: Kind) -> UntypedAPIFuture | None:
        """The answer given before to a request that is made once, unless it failed."""
        known = self._store.futures.last_of(target, kind)
        if known is None or known.status is FutureStatus.FAILED:
            return None
        return UntypedAPIFuture(request_id=known.request_id, model_id=target)

    def record(self, work: Work[Operation], target: str, seq_id: int | None, body: bytes | None) -> None:
        """Promise a request; ``body`` is the request as it came in, if the caller has it."""
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


def new_request_id() -> str:
    """A name for a request, which nobody can guess."""
    return f"req-{secrets.token_hex(12)}"
