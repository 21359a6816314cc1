"""Custom losses: their registration in a session, and how a pass uses one."""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from tinkex import types
from tinkex._wire.endpoints import endpoint
from tinkex.clients._checks import check_data
from tinkex.losses.custom import data_for_logprobs, differentiate, require_torch
from tinkex.losses.traced import LossHandle, check_inputs, run_handle, write_graph
from tinkex.observability.callbacks import delivered_before_errors
from tinkex.observability.events import CustomLossFinished, CustomLossStarted, NullSink

if TYPE_CHECKING:
    from tinkex._transport.caller import Caller
    from tinkex.clients.session import OpenSession
    from tinkex.losses.custom import CustomLoss, Surrogate
    from tinkex.observability.events import Sink

__all__ = ["CustomLossRegistry", "CustomPass", "custom_pass"]

_CREATE = endpoint("create_custom_loss")


class CustomLossRegistry:
    """The custom losses of one session; each is created once."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._known: dict[str, str] = {}
        self._seq_ids = itertools.count()

    async def create(self, opened: OpenSession, traced: LossHandle) -> LossHandle:
        """Returns the handle of a loss in this session; uploads its graph if the server runs losses itself."""
        key = traced.key
        if key in self._known:
            raise ValueError(
                f"create_custom_loss: this session has already created this loss as {self._known[key]!r}; "
                "keep its LossHandle and use that"
            )
        handle = replace(traced, session_id=opened.session_id)
        self._known[key] = handle.name
        if not opened.client_config.custom_loss_server_side:
            return handle
        try:
            return replace(handle, loss_id=await self._upload(opened, handle))
        except BaseException:
            del self._known[key]  # it can be created again
            raise

    async def _upload(self, opened: OpenSession, handle: LossHandle) -> str:
        request = types.CreateCustomLossRequest(
            session_id=opened.session_id,
            custom_loss_seq_id=next(self._seq_ids),
            name=handle.name,
            inputs=list(handle.inputs),
            graph=write_graph(handle),
        )
        began = time.monotonic()
        accepted: types.UntypedAPIFuture = await self._caller.call(_CREATE, request)
        created: types.CreateCustomLossResponse = await opened.results.fetch(
            _CREATE, accepted, submit_s=time.monotonic() - began
        )
        return created.loss_id


@dataclass(frozen=True)
class CustomPass:
    """How a pass runs a custom loss: on the server by its id, or here by its gradient."""

    loss_id: str | None = None
    forward_data: Sequence[types.Datum] = ()
    """The data of the first pass, which returns the logprobs for a loss that runs here."""
    function: CustomLoss | None = None
    may_block: bool = False
    num_regularizers: int = 0
    events: Sink = field(default_factory=NullSink)

    def surrogate(self, data: Sequence[types.Datum], output: types.ForwardBackwardOutput) -> Surrogate:
        """Runs the loss on the logprobs of the first pass and computes its gradient."""
        assert self.function is not None
        self.events.emit(CustomLossStarted(len(data), self.num_regularizers))
        began = time.monotonic()
        try:
            surrogate = differentiate(data, output, self.function)
        except BaseException as error:
            text, elapsed_s = f"{type(error).__name__}: {error}", time.monotonic() - began
            self.events.emit(CustomLossFinished(len(data), elapsed_s, error=text))
            raise
        added = surrogate.metrics.get("regularizer_loss:sum") if self.num_regularizers else None
        elapsed_s = time.monotonic() - began
        self.events.emit(CustomLossFinished(len(data), elapsed_s, surrogate.loss, added))
        return surrogate

    def surrogate_blocking(
        self, data: Sequence[types.Datum], output: types.ForwardBackwardOutput
    ) -> Surrogate:
        """As :meth:`surrogate`; before an error the thread waits, as a result does, until sinks have received its events."""
        with delivered_before_errors():
            return self.surrogate(data, output)

    async def surrogate_async(
        self, data: Sequence[types.Datum], output: types.ForwardBackwardOutput
    ) -> Surrogate:
        """As :meth:`surrogate`; a loss that may block runs in a thread, so that it does not block the caller's loop."""
        if not self.may_block:
            return self.surrogate(data, output)
        return await asyncio.to_thread(self.surrogate, data, output)


def custom_pass(
    data: Sequence[types.Datum],
    loss_fn: Any,
    loss_type_input: str | None,
    regularizers: Sequence[types.RegularizerSpec] = (),
    *,
    session_id: str,
    events: Sink | None = None,
) -> CustomPass:
    """Validates the data and the loss, and decides where the loss runs: here, if there are regularizers."""
    if loss_type_input not in {None, "logprobs"}:
        raise ValueError(f"loss_type_input is 'logprobs', the only supported one; got {loss_type_input!r}")
    if not isinstance(loss_fn, LossHandle) and not callable(loss_fn):
        raise TypeError(
            f"a custom loss is a function of (data, logprobs) or a LossHandle, got {type(loss_fn).__name__}"
        )
    if len(check_data(data)) and not isinstance(data, Sequence):
        raise TypeError("the data of a custom loss is a list, because it is read more than once")
    require_torch()
    function = loss_fn
    if isinstance(loss_fn, LossHandle):
        if loss_fn.session_id != session_id:
            raise ValueError(
                f"the loss {loss_fn.name!r} belongs to session {loss_fn.session_id}, this run to {session_id}; "
                "create the loss with the ServiceClient that made this run"
            )
        check_inputs(loss_fn, data)
        if loss_fn.loss_id is not None and not regularizers:
            return CustomPass(loss_id=loss_fn.loss_id)
        function = functools.partial(run_handle, loss_fn)
    if regularizers:
        from tinkex.losses.regularizers import with_regularizers

        function = with_regularizers(cast("CustomLoss", function), regularizers, events=events)
    return CustomPass(
        forward_data=data_for_logprobs(data),
        function=cast("CustomLoss", function),
        may_block=bool(regularizers),
        num_regularizers=len(regularizers),
        events=events or NullSink(),
    )
