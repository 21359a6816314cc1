"""Losses that users upload: recorded when they come in, found by their id when a pass names one."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from tinkex._wire import json as wire_json
from tinkex.engine.backend.seam import UploadedLoss
from tinkex.engine.operations.access import find_session
from tinkex.engine.operations.fingerprint import fingerprint
from tinkex.engine.operations.outcomes import succeeded
from tinkex.engine.operations.promises import Promises, new_request_id
from tinkex.engine.store import FutureRow, LossRow, Store
from tinkex.errors import InvalidInput, UnknownObject
from tinkex.types import (
    CreateCustomLossRequest,
    CreateCustomLossResponse,
    ForwardBackwardRequest,
    UntypedAPIFuture,
)

CUSTOM = "custom"
KIND = "create_custom_loss"


@dataclass(frozen=True)
class DeclaredInputs:
    """What an uploaded loss reads: its inputs besides the logprobs, and the dimensions of each."""

    input_names: Sequence[str]
    ranks: Mapping[str, int]


class CustomLosses:
    """The uploaded losses. Safe to use from any thread."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def create(self, owner: str, request: CreateCustomLossRequest, promises: Promises) -> UntypedAPIFuture:
        """Take a loss that can be run; its result is there at once. The same request again gives the same loss."""
        session = find_session(self._store, owner, request.session_id)
        target = f"{session.session_id}:loss"
        repeated = promises.repeated(target, request.custom_loss_seq_id, request)
        if repeated is not None:
            return repeated
        loss_id = f"{target}:{request.custom_loss_seq_id}"
        now = time.time()
        row = LossRow(loss_id, session.session_id, owner, request.name, now, wire_json.encode(request))
        future = FutureRow(
            request_id=new_request_id(),
            owner=owner,
            kind=KIND,
            target=target,
            seq_id=request.custom_loss_seq_id,
            payload_hash=fingerprint(request),
            created_at=now,
        )
        outcome = [(future.request_id, succeeded(CreateCustomLossResponse(loss_id=loss_id)))]
        with self._store.database.transaction():
            self._store.losses.add(row)
            self._store.futures.accept(future)
            self._store.finished.add(outcome, {}, now)
            self._store.futures.finish(outcome, now)
        return UntypedAPIFuture(request_id=future.request_id)

    def of(self, owner: str, request: ForwardBackwardRequest) -> UploadedLoss | None:
        """The loss a pass asks for, or None if it asks for one of the server's own."""
        if request.loss_fn != CUSTOM:
            return None
        loss_id = (request.loss_fn_config or {}).get("loss_id")
        if not isinstance(loss_id, str):
            raise InvalidInput(
                "loss_fn 'custom' needs a loss_id, as text, in its loss_fn_config; create_custom_loss gives one."
            )
        row = self._store.losses.get(loss_id)
        if row is None or row.owner != owner:
            raise UnknownObject(
                f"there is no custom loss {loss_id!r} of yours; make one with create_custom_loss."
            )
        return UploadedLoss(loss_id, row.definition)


@lru_cache(maxsize=256)
def declared_inputs(loss: UploadedLoss) -> DeclaredInputs:
    """What an uploaded loss reads, without the graph that computes it."""
    inputs = wire_json.decode(loss.definition, CreateCustomLossRequest).inputs
    return DeclaredInputs([one.name for one in inputs[1:]], {one.name: one.rank for one in inputs})
