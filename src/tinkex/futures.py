"""Operations that finish later: the futures that users hold, and the polling of their results.

The polling state machine is ``_transport/polling.py``; :class:`Results` drives it over a caller.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from tinkex._runtime import APIFuture, AwaitableConcurrentFuture, background
from tinkex._transport.headers import PROTOBUF
from tinkex._transport.polling import (
    Failed,
    PollAgain,
    Polled,
    PollState,
    Ready,
    invalid_reply,
    next_step,
    shape_of,
)
from tinkex._wire import json
from tinkex._wire.endpoints import endpoint
from tinkex.errors import APIConnectionError
from tinkex.observability.callbacks import deliver
from tinkex.observability.events import QueueStateChanged, RetryScheduled, StillWaiting
from tinkex.observability.queues import QueueCallback, QueueSink
from tinkex.observability.tracing import current

if TYPE_CHECKING:
    from tinkex._transport.base import Reply
    from tinkex._transport.budget import ByteBudget
    from tinkex._transport.caller import Caller
    from tinkex._wire.endpoints import Endpoint
    from tinkex.observability.tracing import OperationSpan
    from tinkex.types import UntypedAPIFuture

__all__ = ["APIFuture", "AwaitableConcurrentFuture", "Results", "gather"]

T = TypeVar("T")

POLL_TIMEOUT_S = 45.0
REPORT_INTERVAL_S = 60.0
"""How often ``StillWaiting`` is emitted for a pending result."""


def gather(*futures: APIFuture[T]) -> AwaitableConcurrentFuture[list[T]]:
    """All results in the order of ``futures``; the first error is raised immediately.

    >>> a: AwaitableConcurrentFuture[int] = AwaitableConcurrentFuture()
    >>> b: AwaitableConcurrentFuture[int] = AwaitableConcurrentFuture()
    >>> a.set_result(1); b.set_result(2)
    >>> gather(a, b).result()
    [1, 2]
    """
    for each in futures:
        if not isinstance(each, APIFuture):
            raise TypeError(
                f"gather takes futures as arguments, got {type(each).__name__}; for a list write gather(*futures)"
            )

    async def all_results() -> list[T]:
        tasks = [asyncio.ensure_future(future.result_async()) for future in futures]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    return background().submit(all_results())


# ---- the driver ----


class Results:
    """Fetches the results of operations that a server has accepted."""

    def __init__(
        self,
        caller: Caller,
        inflight: ByteBudget,
        *,
        payment_pause_s: float = 0.0,
        report_interval_s: float = REPORT_INTERVAL_S,
    ) -> None:
        self._caller = caller
        self._inflight = inflight
        self._payment_pause_s = payment_pause_s
        self._report_interval_s = report_interval_s
        self._about = caller.about(_RETRIEVE)

    def _queue_changed(
        self, event: QueueStateChanged, operation: OperationSpan | None, on_queue: QueueCallback | None
    ) -> None:
        """Emits the queue's state, which the operation's span and, on a thread of its own, its queue observer receive too."""
        bus = self._caller.sink
        bus.emit(event, *([operation] if operation is not None else []))
        if on_queue is not None:
            observer = QueueSink(on_queue, bus)
            deliver(self._caller.callbacks, "on_queue_state_change", observer.emit, event)

    async def fetch(
        self,
        endpoint: Endpoint,
        accepted: UntypedAPIFuture,
        *,
        request_type: str | None = None,
        submit_s: float | None = None,
        on_queue: QueueCallback | None = None,
        client: str = "",
        payload_bytes: int = 0,
    ) -> Any:
        """Polls until the operation has ended and returns a value of ``endpoint.result``, or raises its error.

        ``client`` is the run or sampler of the operation, for events; ``payload_bytes`` is the size of the result if it is
        already known.
        """
        kind = request_type or endpoint.request_type or endpoint.name
        operation = current()
        if operation is not None:
            operation.add_request_id(accepted.request_id)
        polled = Polled(
            accepted.request_id,
            endpoint.result_wire == "proto",
            self._about,
            self._payment_pause_s,
            self._caller.config.poll_backoff,
        )
        state = PollState(allow_metadata=payload_bytes == 0)
        queue: tuple[str, str | None] | None = None
        began = reported = time.monotonic()
        if payload_bytes:
            await self._inflight.acquire(payload_bytes)
        reserved_bytes = payload_bytes
        try:
            while True:
                step = await self._poll(state, polled, kind, submit_s)
                if isinstance(step, Failed):
                    raise step.error
                if isinstance(step, Ready):
                    return _value(endpoint, step, accepted, polled)
                state = step.state
                if step.queue is not None and step.queue != queue:
                    queue = step.queue
                    changed = QueueStateChanged(polled.request_id, kind, *queue, client)
                    self._queue_changed(changed, operation, on_queue)
                now = time.monotonic()
                if now - reported >= self._report_interval_s:
                    reported = now
                    queue_state, reason = queue or (None, None)
                    self._caller.sink.emit(
                        StillWaiting(polled.request_id, kind, now - began, queue_state, reason, client)
                    )
                if step.failure is not None:
                    attempt = max(state.failures, state.fast_replies, state.bad_requests, 1) - 1
                    self._caller.sink.emit(RetryScheduled(_RETRIEVE.name, attempt, step.after, step.failure))
                if step.payload_bytes is not None:
                    await self._inflight.acquire(step.payload_bytes)
                    reserved_bytes = step.payload_bytes
                if step.after > 0:
                    async with self._caller.closable(_RETRIEVE):
                        await asyncio.sleep(step.after)
        finally:
            if reserved_bytes:
                self._inflight.release(reserved_bytes)

    async def poll_queue(
        self, endpoint: Endpoint, request_id: str, client: str, on_queue: QueueCallback
    ) -> None:
        """Polls once for the queue state of an operation and emits it; a result stays on the server."""
        kind = endpoint.request_type or endpoint.name
        polled = Polled(request_id, endpoint.result_wire == "proto", self._about)
        step = await self._poll(PollState(), polled, kind, None)
        if isinstance(step, PollAgain) and step.queue is not None:
            self._queue_changed(QueueStateChanged(request_id, kind, *step.queue, client), None, on_queue)

    async def _poll(
        self, state: PollState, polled: Polled, kind: str, submit_s: float | None
    ) -> Ready | PollAgain | Failed:
        from tinkex.types import FutureRetrieveRequest

        headers = {"x-tinker-request-iteration": str(state.iteration), "x-tinker-request-type": kind}
        if polled.wants_proto:
            headers["accept"] = PROTOBUF
        if state.iteration == 0 and submit_s is not None:
            headers["x-tinker-create-promise-roundtrip-time"] = f"{submit_s:.6f}"
        body = json.encode(
            FutureRetrieveRequest(request_id=polled.request_id, allow_metadata_only=state.allow_metadata),
            omit_none=False,  # no field is None
        )
        began = time.monotonic()
        outcome: Reply | APIConnectionError
        try:
            outcome = await self._caller.attempt(_RETRIEVE, body, headers=headers, timeout=POLL_TIMEOUT_S)
        except APIConnectionError as error:
            outcome = error
        return next_step(state, outcome, time.monotonic() - began, polled)


_RETRIEVE = endpoint("retrieve_future")


def _value(endpoint: Endpoint, ready: Ready, accepted: UntypedAPIFuture, polled: Polled) -> Any:
    try:
        if endpoint.result_wire == "proto":
            return _proto_value(endpoint, ready.reply.body, accepted.sample_sequence_ids)
        return _json_value(endpoint, ready.parsed)
    except ValueError as error:
        failed = invalid_reply(ready.reply, polled, str(error))
        raise failed.error from error


def _json_value(endpoint: Endpoint, parsed: Mapping[str, Any]) -> Any:
    """The result in an object; raises ``ValueError``, which names its shape, if it is not a result of this operation.

    Fields that are unknown are ignored, but an object that has no field of the result at all is something else.
    """
    from tinkex.types.plain import from_plain

    assert endpoint.result is not None
    if endpoint.result is dict:
        return dict(parsed)  # the caller has only the operation's id
    expected = endpoint.result.__name__
    fields = set(endpoint.result.__struct_fields__)
    named = parsed.get("type") in (endpoint.name, endpoint.request_type)
    if parsed and not named and fields.isdisjoint(parsed):
        raise ValueError(f"{shape_of(parsed)} instead of {expected}")
    try:
        return from_plain(parsed, endpoint.result)
    except ValueError as error:
        raise ValueError(f"{shape_of(parsed)} is not {expected}: {error}") from error


def _proto_value(endpoint: Endpoint, body: bytes, sequence_ids: Sequence[str] | None) -> Any:
    from tinkex._wire import proto

    if endpoint.name == "asample":
        return proto.decode_sample_response(body, sequence_ids)
    return proto.decode_forward_backward_output(body)
