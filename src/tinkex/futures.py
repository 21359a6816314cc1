"""Operations that finish later: the futures users hold, and how their results are fetched.

The polling state machine is :func:`next_step`, a pure function; :class:`Results` drives it over a caller.
"""

from __future__ import annotations

import asyncio
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tinkex._runtime import await_future, background
from tinkex._transport.caller import PROTOBUF, error_of, is_proxy_error
from tinkex._transport.retry import PAYMENT_PAUSE_S, is_transient, retry_after
from tinkex._wire import json
from tinkex._wire.endpoints import endpoint
from tinkex.config.values import POLL_BACKOFF
from tinkex.errors import (
    APIConnectionError,
    APIResponseValidationError,
    HttpRequest,
    HttpResponse,
    RequestErrorCategory,
    RequestFailedError,
    ResultExpiredError,
    TinkexError,
)
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
T_co = TypeVar("T_co", covariant=True)

POLL_TIMEOUT_S = 45.0
HELD_S = 1.0
"""A poll answered sooner was not held by the server: the next one waits, so that nobody spins."""
SETBACK_CAP_S = 30.0
MAX_REFUSALS = 3
REPORT_EVERY_S = 60.0
"""How often a result that does not come is told to those who watch."""


# ---- what users hold ----


class APIFuture(ABC, Generic[T_co]):
    """The result of an operation that was called and finishes later.

    ``future.result()`` blocks, ``await future`` waits on any event loop. A timeout raises ``TimeoutError``
    and leaves the operation running; waiting again is fine.
    """

    @abstractmethod
    def result(self, timeout: float | None = None) -> T_co:
        """The result; waits up to ``timeout`` seconds, without limit by default."""

    @abstractmethod
    async def result_async(self, timeout: float | None = None) -> T_co:
        """The result, for callers with an event loop."""

    def __await__(self) -> Generator[Any, None, T_co]:
        return self.result_async().__await__()


class AwaitableConcurrentFuture(APIFuture[T]):
    """An :class:`APIFuture` over a ``concurrent.futures.Future``, which ``future()`` returns.

    >>> done: Future[int] = Future()
    >>> done.set_result(3)
    >>> AwaitableConcurrentFuture(done).result()
    3
    """

    def __init__(self, future: Future[T]) -> None:
        self._future = future

    def result(self, timeout: float | None = None) -> T:
        """The result; waits up to ``timeout`` seconds, without limit by default."""
        if not self._future.done() and background().is_current_thread:
            raise RuntimeError("result() would block the client's own event loop; await the future there")
        return self._future.result(None if timeout == math.inf else timeout)

    async def result_async(self, timeout: float | None = None) -> T:
        """The result, on any event loop; a timeout or cancellation leaves the operation running."""
        async with asyncio.timeout(timeout):
            return await await_future(self._future)

    def future(self) -> Future[T]:
        """The underlying future, for callbacks and ``concurrent.futures.wait``."""
        return self._future

    def done(self) -> bool:
        """Whether there is a result or an error."""
        return self._future.done()

    def cancel(self) -> bool:
        """Stops waiting for the result; an operation that was called is still carried out in its turn."""
        return self._future.cancel()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {'done' if self._future.done() else 'pending'}>"


def gather(*futures: APIFuture[T]) -> AwaitableConcurrentFuture[list[T]]:
    """All results in the order of the futures; the first error to happen is raised at once.

    >>> a, b = Future(), Future()
    >>> a.set_result(1); b.set_result(2)
    >>> gather(AwaitableConcurrentFuture(a), AwaitableConcurrentFuture(b)).result()
    [1, 2]
    """

    async def all_results() -> list[T]:
        waiting = [asyncio.ensure_future(future.result_async()) for future in futures]
        try:
            return list(await asyncio.gather(*waiting))
        finally:
            for task in waiting:
                task.cancel()

    return AwaitableConcurrentFuture(background().submit(all_results()))


# ---- the polling state machine ----


@dataclass(frozen=True, slots=True)
class Polled:
    """What is being polled for."""

    request_id: str
    wants_proto: bool
    about: HttpRequest
    payment_pause_s: float = 0.0
    backoff: tuple[float, float] = POLL_BACKOFF
    """The first and the longest wait after answers that the server gave at once."""


@dataclass(frozen=True, slots=True)
class PollState:
    """Where polling stands; every field but ``iteration`` counts events in a row."""

    iteration: int = 0
    allow_metadata: bool = True
    hurries: int = 0
    """Answers without a result that the server gave at once."""
    setbacks: int = 0
    """Polls that were not answered, or answered 429."""
    refusals: int = 0
    """Polls answered 400."""
    payment_waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Ready:
    """The result is in this reply."""

    reply: Reply
    plain: Any = None
    """The parsed JSON, for results that are not protobuf."""


@dataclass(frozen=True, slots=True)
class Again:
    """Poll again after so many seconds."""

    after: float
    state: PollState
    queue: tuple[str, str | None] | None = None
    """The queue state and its reason, when the server said so."""
    payload_bytes: int | None = None
    """The size of a result that is ready and must find room first."""
    trouble: str | None = None
    """Why this poll was lost, when it was."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Polling is over; this error goes to the caller."""

    error: TinkexError


def next_step(
    state: PollState, got: Reply | APIConnectionError, held_s: float, polled: Polled
) -> Ready | Again | Failed:
    """What to do after a poll that took ``held_s`` seconds and brought a reply, or none.

    ====================================  ==================================================================
    200 protobuf / JSON                   the result
    200 ``try_again``, 408, 5xx           poll again; at once if the server held the poll, else backing off
    200 ``complete_metadata``             poll again for the payload, once there is room for it
    200 with ``error``                    ``RequestFailedError``
    no answer, empty 400, 429             poll again after 1, 2, 4 … 30 s
    400                                   poll again, at most three times in a row
    402                                   poll again every 5 s while the payment pause lasts
    410                                   ``ResultExpiredError``
    any other status                      its typed error
    ====================================  ==================================================================
    """
    if (
        not isinstance(got, APIConnectionError)
        and got.status == 200
        and _is_proto(got)
        and polled.wants_proto
    ):
        return Ready(got)  # the usual case comes first: it is what fast loops wait for
    state = replace(state, iteration=state.iteration + 1)
    if isinstance(got, APIConnectionError):
        return _setback(state, got.message)
    if got.status == 200:
        return _answered(replace(state, setbacks=0, payment_waited_s=0.0), got, held_s, polled)
    if is_proxy_error(got):
        return _setback(state, "an empty 400, as proxies send")
    if got.status == 429:
        return _setback(state, "status 429", retry_after(got.headers, 60.0) or 0.0)
    calm = replace(state, setbacks=0)
    if got.status == 408 or (got.status >= 500 and is_transient(got.status)):
        trouble = None if got.status == 408 else f"status {got.status}"
        return _not_yet(replace(calm, refusals=0), held_s, polled, _queue_of(got), trouble)
    if got.status == 400 and state.refusals < MAX_REFUSALS:
        return _not_yet(replace(calm, refusals=state.refusals + 1), held_s, polled, None, "status 400")
    if got.status == 402 and state.payment_waited_s < polled.payment_pause_s:
        waited = replace(calm, payment_waited_s=state.payment_waited_s + PAYMENT_PAUSE_S)
        return Again(PAYMENT_PAUSE_S, waited, trouble="the account cannot pay (402)")
    if got.status == 410:
        return Failed(
            ResultExpiredError(
                f"the server no longer holds the result of request {polled.request_id}; submit the operation again",
                polled.request_id,
            )
        )
    return Failed(error_of(got, polled.about))


def _answered(state: PollState, reply: Reply, held_s: float, polled: Polled) -> Ready | Again | Failed:
    if _is_proto(reply):
        return _unreadable(reply, polled, "protobuf instead of JSON")
    try:
        plain = json.decode_any(reply.body)
    except json.Malformed as error:
        return _unreadable(reply, polled, str(error))
    if not isinstance(plain, dict):
        return _unreadable(reply, polled, "no JSON object")
    if plain.get("type") == "try_again":
        return _not_yet(replace(state, refusals=0), held_s, polled, _queue_state(plain))
    if plain.get("status") == "complete_metadata":
        if not state.allow_metadata:
            return _unreadable(reply, polled, "the size of the result where the result itself was asked for")
        size = plain.get("response_payload_size")
        asked = replace(state, allow_metadata=False, hurries=0)
        return Again(0.0, asked, payload_bytes=size if isinstance(size, int) and size > 0 else 0)
    if "error" in plain:
        category = RequestErrorCategory.parse(plain.get("category"))
        return Failed(RequestFailedError(str(plain["error"]), polled.request_id, category))
    if polled.wants_proto:
        return _unreadable(reply, polled, "JSON instead of protobuf")
    return Ready(reply, plain)


def _is_proto(reply: Reply) -> bool:
    return PROTOBUF in reply.headers.get("content-type", "")


def _not_yet(
    state: PollState,
    held_s: float,
    polled: Polled,
    queue: tuple[str, str | None] | None,
    trouble: str | None = None,
) -> Again:
    if held_s >= HELD_S:
        return Again(0.0, replace(state, hurries=0), queue, trouble=trouble)
    first, longest = polled.backoff
    after = min(first * 2.0 ** min(state.hurries, 60), longest)
    return Again(after, replace(state, hurries=state.hurries + 1), queue, trouble=trouble)


def _setback(state: PollState, trouble: str, asked_s: float = 0.0) -> Again:
    own = min(2.0 ** min(state.setbacks, 60), SETBACK_CAP_S)
    return Again(max(own, asked_s), replace(state, setbacks=state.setbacks + 1), trouble=trouble)


def _unreadable(reply: Reply, polled: Polled, what: str) -> Failed:
    response = HttpResponse(reply.status, reply.headers, "", polled.about)
    message = f"the result of request {polled.request_id} does not follow the protocol: {what}"
    return Failed(APIResponseValidationError(response, None, message))


def _queue_of(reply: Reply) -> tuple[str, str | None] | None:
    try:
        plain = json.decode_any(reply.body)
    except json.Malformed:
        return None
    return _queue_state(plain) if isinstance(plain, dict) else None


def _queue_state(plain: dict[str, Any]) -> tuple[str, str | None] | None:
    state = plain.get("queue_state")
    if not isinstance(state, str):
        return None
    known = state if state in {"active", "paused_capacity", "paused_rate_limit"} else "unknown"
    reason = plain.get("queue_state_reason")
    return known, reason if isinstance(reason, str) else None


# ---- the driver ----


class Results:
    """Fetches the results of operations a server has accepted."""

    def __init__(
        self,
        caller: Caller,
        inflight: ByteBudget,
        *,
        payment_pause_s: float = 0.0,
        report_every_s: float = REPORT_EVERY_S,
    ) -> None:
        self._caller = caller
        self._inflight = inflight
        self._payment_pause_s = payment_pause_s
        self._report_every_s = report_every_s
        self._about = caller.about(_RETRIEVE)

    def _queue_changed(
        self, event: QueueStateChanged, operation: OperationSpan | None, on_queue: QueueCallback | None
    ) -> None:
        """Emits the queue's state, which the operation's span and its queue observer receive too."""
        bus = self._caller.sink
        observers = [QueueSink(on_queue, bus)] if on_queue is not None else []
        bus.emit(event, *([operation] if operation is not None else []), *observers)

    async def fetch(
        self,
        row: Endpoint,
        accepted: UntypedAPIFuture,
        *,
        request_type: str | None = None,
        submit_s: float | None = None,
        on_queue: QueueCallback | None = None,
        client: str = "",
        payload_bytes: int = 0,
    ) -> Any:
        """Polls until the operation is done and returns a value of ``row.result``, or raises its error.

        ``client`` is the run or sampler the operation belongs to, for those who watch; ``payload_bytes`` is the
        size of the result where that is known already.
        """
        kind = request_type or row.request_type or row.name
        operation = current()
        if operation is not None:
            operation.add_request_id(accepted.request_id)
        polled = Polled(
            accepted.request_id,
            row.result_wire == "proto",
            self._about,
            self._payment_pause_s,
            self._caller.config.poll_backoff,
        )
        state = PollState(allow_metadata=payload_bytes == 0)
        queue: tuple[str, str | None] | None = None
        began = reported = time.monotonic()
        if payload_bytes:
            await self._inflight.acquire(payload_bytes)
        held_bytes = payload_bytes
        try:
            while True:
                step = await self._poll(state, polled, kind, submit_s)
                if isinstance(step, Failed):
                    raise step.error
                if isinstance(step, Ready):
                    return _value(row, step, accepted, polled)
                state = step.state
                if step.queue is not None and step.queue != queue:
                    queue = step.queue
                    changed = QueueStateChanged(polled.request_id, kind, *queue, client)
                    self._queue_changed(changed, operation, on_queue)
                now = time.monotonic()
                if now - reported >= self._report_every_s:
                    reported = now
                    said, reason = queue or (None, None)
                    self._caller.sink.emit(
                        StillWaiting(polled.request_id, kind, now - began, said, reason, client)
                    )
                if step.trouble is not None:
                    tries = max(state.setbacks, state.hurries, state.refusals) - 1
                    self._caller.sink.emit(RetryScheduled(_RETRIEVE.name, tries, step.after, step.trouble))
                if step.payload_bytes is not None:
                    await self._inflight.acquire(step.payload_bytes)
                    held_bytes = step.payload_bytes
                if step.after > 0:
                    async with self._caller.closable(_RETRIEVE):
                        await asyncio.sleep(step.after)
        finally:
            if held_bytes:
                self._inflight.release(held_bytes)

    async def ask(self, row: Endpoint, request_id: str, client: str, on_queue: QueueCallback) -> None:
        """Asks once for the queue state of an operation, and emits it; its result is left where it is."""
        kind = row.request_type or row.name
        polled = Polled(request_id, row.result_wire == "proto", self._about)
        step = await self._poll(PollState(), polled, kind, None)
        if isinstance(step, Again) and step.queue is not None:
            self._queue_changed(QueueStateChanged(request_id, kind, *step.queue, client), None, on_queue)

    async def _poll(
        self, state: PollState, polled: Polled, kind: str, submit_s: float | None
    ) -> Ready | Again | Failed:
        from tinkex.types import FutureRetrieveRequest

        headers = {"x-tinker-request-iteration": str(state.iteration), "x-tinker-request-type": kind}
        if polled.wants_proto:
            headers["accept"] = PROTOBUF
        if state.iteration == 0 and submit_s is not None:
            headers["x-tinker-create-promise-roundtrip-time"] = f"{submit_s:.6f}"
        body = json.encode(
            FutureRetrieveRequest(request_id=polled.request_id, allow_metadata_only=state.allow_metadata),
            omit_none=False,  # there is none
        )
        began = time.monotonic()
        got: Reply | APIConnectionError
        try:
            got = await self._caller.attempt(_RETRIEVE, body, headers=headers, timeout=POLL_TIMEOUT_S)
        except APIConnectionError as error:
            got = error
        return next_step(state, got, time.monotonic() - began, polled)


_RETRIEVE = endpoint("retrieve_future")


def _value(row: Endpoint, ready: Ready, accepted: UntypedAPIFuture, polled: Polled) -> Any:
    try:
        if row.result_wire == "proto":
            return _proto_value(row, ready.reply.body, accepted.sample_sequence_ids or [])
        from tinkex.types.plain import from_plain

        assert row.result is not None
        return from_plain(ready.plain, row.result)
    except ValueError as error:
        failed = _unreadable(ready.reply, polled, str(error))
        raise failed.error from error


def _proto_value(row: Endpoint, body: bytes, sequence_ids: Sequence[str]) -> Any:
    from tinkex._wire import proto

    if row.name == "asample":
        return proto.decode_sample_response(body, sequence_ids)
    return proto.decode_forward_backward_output(body)
