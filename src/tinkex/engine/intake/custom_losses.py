"""Uploaded losses: a client sends the graph once, and passes name it."""

from __future__ import annotations

import time

from tinkex._wire import json as wire_json
from tinkex.engine.encoding import succeeded
from tinkex.engine.intake.accepted import AcceptedRequests, new_request_id
from tinkex.engine.intake.fingerprint import fingerprint
from tinkex.engine.lookup import find_session
from tinkex.engine.store import FutureRow, LossRow, Store
from tinkex.types import CreateCustomLossRequest, CreateCustomLossResponse, UntypedAPIFuture

KIND = "create_custom_loss"


def create_custom_loss(
    store: Store, accepted: AcceptedRequests, owner: str, request: CreateCustomLossRequest
) -> UntypedAPIFuture:
    """Record a loss and its result in one commit; the same request again returns the same loss."""
    session = find_session(store, owner, request.session_id)
    target = f"{session.session_id}:loss"
    duplicate = accepted.find_duplicate(target, request.custom_loss_seq_id, request)
    if duplicate is not None:
        return duplicate
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
    with store.database.transaction():
        store.losses.add(row)
        store.futures.accept(future)
        store.finished.add(outcome, {}, now)
        store.futures.finish(outcome, now)
    return UntypedAPIFuture(request_id=future.request_id)
