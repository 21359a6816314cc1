"""Operations that finish later: the futures that users hold, and the polling of their results.

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
MIN_LONG_POLL_S = 1.0
"""A faster reply was not a long poll: the client waits before the next one, so that it never spins."""
MAX_FAILURE_BACKOFF_S = 30.0
MAX_BAD_REQUESTS = 3
REPORT_INTERVAL_S = 60.0
"""How often ``StillWaiting`` is emitted for a pending result."""


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
        """The result, for asynchronous callers."""

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
        """Stops waiting for the result; the operation itself is still executed in its turn."""
        return self._future.cancel()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {'done' if self._future.done() else 'pending'}>"


def gather(*futures: APIFuture[T]) -> AwaitableConcurrentFuture[list[T]]:
    """All results in the order of the futures; the first error is raised immediately.

    >>> a, b = Future(), Future()
    >>> a.set_result(1); b.set_result(2)
    >>> gather(AwaitableConcurrentFuture(a), AwaitableConcurrentFuture(b)).result()
    [1, 2]
    """

    async def all_results() -> list[T]:
        tasks = [asyncio.ensure_future(future.result_async()) for future in futures]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    return AwaitableConcurrentFuture(background().submit(all_results()))


# ---- the polling state machine ----


@dataclass(frozen=True, slots=True)
class Polled:
    """The operation that is polled."""

    request_id: str
    wants_proto: bool
    about: HttpRequest
    payment_pause_s: float = 0.0
    backoff: tuple[float, float] = POLL_BACKOFF
    """The initial and the maximum wait after fast replies."""


@dataclass(frozen=True, slots=True)
class PollState:
    """The state of polling; all counters but ``iteration`` count consecutive events."""

    iteration: int = 0
    allow_metadata: bool = True
    fast_replies: int = 0
    """Replies without a result that came in less than ``MIN_LONG_POLL_S``."""
    failures: int = 0
    """Polls without a reply, or with a 429."""
    bad_requests: int = 0
    """Polls with a 400."""
    payment_waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Ready:
    """The result is in this reply."""

    reply: Reply
    parsed: Any = None
    """The parsed JSON, for results that are not protobuf."""


@dataclass(frozen=True, slots=True)
class PollAgain:
    """Poll again after so many seconds."""

    after: float
    state: PollState
    queue: tuple[str, str | None] | None = None
    """The queue state and its reason, if the server sent one."""
    payload_bytes: int | None = None
    """The size of a finished result, which must fit into the byte budget first."""
    failure: str | None = None
    """Why this poll failed, if it did."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Polling ends with this error."""

    error: TinkexError


def next_step(
    state: PollState, outcome: Reply | APIConnectionError, duration_s: float, polled: Polled
) -> Ready | PollAgain | Failed:
    """What to do after a poll that took ``duration_s`` seconds.

    ====================================  ==================================================================
    200 protobuf / JSON                   the result
    200 ``try_again``, 408, 5xx           poll again; immediately after a long poll, else with back-off
    200 ``complete_metadata``             poll again for the payload, once the byte budget has room for it
    200 with ``error``                    ``RequestFailedError``
    no reply, empty 400, 429              poll again after 1, 2, 4 … 30 s
    400                                   poll again, at most three consecutive times
    402                                   poll again every 5 s during the payment pause
    410                                   ``ResultExpiredError``
    any other status                      its typed error
    ====================================  ==================================================================
    """
    if (
        not isinstance(outcome, APIConnectionError)
        and outcome.status == 200
        and _is_proto(outcome)
        and polled.wants_proto
    ):
        return Ready(outcome)  # the usual case comes first, for speed
    state = replace(state, iteration=state.iteration + 1)
    if isinstance(outcome, APIConnectionError):
        return _after_failure(state, outcome.message)
    if outcome.status == 200:
        return _after_reply(replace(state, failures=0, payment_waited_s=0.0), outcome, duration_s, polled)
    if is_proxy_error(outcome):
        return _after_failure(state, "an empty 400, probably of a proxy")
    if outcome.status == 429:
        return _after_failure(state, "status 429", retry_after(outcome.headers, 60.0) or 0.0)
    recovered = replace(state, failures=0)
    if outcome.status == 408 or (outcome.status >= 500 and is_transient(outcome.status)):
        failure = None if outcome.status == 408 else f"status {outcome.status}"
        return _pending(replace(recovered, bad_requests=0), duration_s, polled, _queue_of(outcome), failure)
    if outcome.status == 400 and state.bad_requests < MAX_BAD_REQUESTS:
        counted = replace(recovered, bad_requests=state.bad_requests + 1)
        return _pending(counted, duration_s, polled, None, "status 400")
    if outcome.status == 402 and state.payment_waited_s < polled.payment_pause_s:
        waited = replace(recovered, payment_waited_s=state.payment_waited_s + PAYMENT_PAUSE_S)
        return PollAgain(PAYMENT_PAUSE_S, waited, failure="the account cannot pay (402)")
    if outcome.status == 410:
        return Failed(
            ResultExpiredError(
                f"the server has deleted the result of request {polled.request_id}; submit the operation again",
                polled.request_id,
            )
        )
    return Failed(error_of(outcome, polled.about))


def _after_reply(
    state: PollState, reply: Reply, duration_s: float, polled: Polled
) -> Ready | PollAgain | Failed:
    if _is_proto(reply):
        return _invalid(reply, polled, "protobuf instead of JSON")
    try:
        parsed = json.decode_any(reply.body)
    except json.Malformed as error:
        return _invalid(reply, polled, str(error))
    if not isinstance(parsed, dict):
        return _invalid(reply, polled, "not a JSON object")
    if parsed.get("type") == "try_again":
        return _pending(replace(state, bad_requests=0), duration_s, polled, _queue_state(parsed))
    if parsed.get("status") == "complete_metadata":
        if not state.allow_metadata:
            return _invalid(reply, polled, "the size of the result instead of the result")
        size = parsed.get("response_payload_size")
        waiting = replace(state, allow_metadata=False, fast_replies=0)
        return PollAgain(0.0, waiting, payload_bytes=size if isinstance(size, int) and size > 0 else 0)
    if "error" in parsed:
        category = RequestErrorCategory.parse(parsed.get("category"))
        return Failed(RequestFailedError(str(parsed["error"]), polled.request_id, category))
    if polled.wants_proto:
        return _invalid(reply, polled, "JSON instead of protobuf")
    return Ready(reply, parsed)


def _is_proto(reply: Reply) -> bool:
    return PROTOBUF in reply.headers.get("content-type", "")


def _pending(
    state: PollState,
    duration_s: float,
    polled: Polled,
    queue: tuple[str, str | None] | None,
    failure: str | None = None,
) -> PollAgain:
    if duration_s >= MIN_LONG_POLL_S:
        return PollAgain(0.0, replace(state, fast_replies=0), queue, failure=failure)
    initial_s, max_s = polled.backoff
    after = min(initial_s * 2.0 ** min(state.fast_replies, 60), max_s)
    return PollAgain(after, replace(state, fast_replies=state.fast_replies + 1), queue, failure=failure)


def _after_failure(state: PollState, failure: str, retry_after_s: float = 0.0) -> PollAgain:
    own = min(2.0 ** min(state.failures, 60), MAX_FAILURE_BACKOFF_S)
    return PollAgain(max(own, retry_after_s), replace(state, failures=state.failures + 1), failure=failure)


def _invalid(reply: Reply, polled: Polled, what: str) -> Failed:
    response = HttpResponse(reply.status, reply.headers, "", polled.about)
    message = f"the result of request {polled.request_id} does not follow the protocol: {what}"
    return Failed(APIResponseValidationError(response, None, message))


def _queue_of(reply: Reply) -> tuple[str, str | None] | None:
    try:
        parsed = json.decode_any(reply.body)
    except json.Malformed:
        return None
    return _queue_state(parsed) if isinstance(parsed, dict) else None


def _queue_state(parsed: dict[str, Any]) -> tuple[str, str | None] | None:
    state = parsed.get("queue_state")
    if not isinstance(state, str):
        return None
    known = state if state in {"active", "paused_capacity", "paused_rate_limit"} else "unknown"
    reason = parsed.get("queue_state_reason")
    return known, reason if isinstance(reason, str) else None


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
        """Emits the queue's state, which the operation's span and its queue observer receive too."""
        bus = self._caller.sink
        observers = [QueueSink(on_queue, bus)] if on_queue is not None else []
        bus.emit(event, *([operation] if operation is not None else []), *observers)

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
                    attempt = max(state.failures, state.fast_replies, state.bad_requests) - 1
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
            return _proto_value(endpoint, ready.reply.body, accepted.sample_sequence_ids or [])
        from tinkex.types.plain import from_plain

        assert endpoint.result is not None
        return from_plain(ready.parsed, endpoint.result)
    except ValueError as error:
        failed = _invalid(ready.reply, polled, str(error))
        raise failed.error from error


def _proto_value(endpoint: Endpoint, body: bytes, sequence_ids: Sequence[str]) -> Any:
    from tinkex._wire import proto

    if endpoint.name == "asample":
        return proto.decode_sample_response(body, sequence_ids)
    return proto.decode_forward_backward_output(body)
