"""Losses that users upload: checked and recorded when they come in, found by their id when a pass names one."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING

import msgspec

from tinkex._wire import json as wire_json
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

if TYPE_CHECKING:
    from tinkex.engine.trainer.loss_graph import LossGraph

CUSTOM = "custom"
KIND = "create_custom_loss"
MOST_IN_MEMORY = 256


class CustomLosses:
    """The uploaded losses, ready to run. Safe to use from any thread."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._graphs: OrderedDict[str, LossGraph] = OrderedDict()

    def create(self, owner: str, request: CreateCustomLossRequest, promises: Promises) -> UntypedAPIFuture:
        """Take a loss; its result is there at once. The same request again gives the same loss."""
        session = find_session(self._store, owner, request.session_id)
        target = f"{session.session_id}:loss"
        repeated = promises.repeated(target, request.custom_loss_seq_id, request)
        if repeated is not None:
            return repeated
        graph = _parse(request)
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
        self._keep(loss_id, graph)
        return UntypedAPIFuture(request_id=future.request_id)

    def of(self, owner: str, request: ForwardBackwardRequest) -> LossGraph | None:
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
        with self._lock:
            graph = self._graphs.get(loss_id)
        if graph is None:
            graph = _parse(wire_json.decode(row.definition, CreateCustomLossRequest))
        self._keep(loss_id, graph)
        return graph

    def _keep(self, loss_id: str, graph: LossGraph) -> None:
        with self._lock:
            self._graphs[loss_id] = graph
            self._graphs.move_to_end(loss_id)
            while len(self._graphs) > MOST_IN_MEMORY:
                self._graphs.popitem(last=False)


def _parse(request: CreateCustomLossRequest) -> LossGraph:
    from tinkex.engine.trainer.loss_graph import LossGraph

    return LossGraph.parse(msgspec.to_builtins(request.graph), request.inputs)
