"""The polling of results as a state machine: what to do after each reply, a pure function."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tinkex._transport.caller import error_of, is_proxy_error
from tinkex._transport.headers import PROTOBUF
from tinkex._transport.retry import PAYMENT_PAUSE_S, is_transient, retry_after
from tinkex._wire import json
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

if TYPE_CHECKING:
    from tinkex._transport.base import Reply

__all__ = [
    "MIN_LONG_POLL_S",
    "Failed",
    "PollAgain",
    "PollState",
    "Polled",
    "Ready",
    "fast_reply_pause_s",
    "invalid_reply",
    "next_step",
    "shape_of",
]

MIN_LONG_POLL_S = 1.0
"""A faster reply was not a long poll: the client waits before the next one, so that it never spins."""
MAX_FAILURE_BACKOFF_S = 30.0
MAX_BAD_REQUESTS = 3
PAUSED_POLL_S = 1.0
"""How long after a fast reply a paused operation is polled again."""
MAX_SERVER_WAIT_S = 60.0
"""The longest wait before the next poll that a server may request."""
MAX_SHOWN_KEYS = 8


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
    200 protobuf / JSON without status    the result
    200 ``completed``                     the result in its field ``result``
    200 ``pending``, ``try_again``        poll again: after ``retry_after_ms`` where that is set; else immediately after a
    and 408, 5xx                          long poll, after 1 s while the queue is paused, else with back-off
    200 ``complete_metadata``             poll again for the payload, once the byte budget has room for it
    200 ``failed``, or with ``error``     ``RequestFailedError``
    200 with any other ``status``         ``APIResponseValidationError``, which names it
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
        return _after_failure(state, "status 429", retry_after(outcome.headers, MAX_SERVER_WAIT_S) or 0.0)
    recovered = replace(state, failures=0)
    if outcome.status == 408 or (outcome.status >= 500 and is_transient(outcome.status)):
        failure = None if outcome.status == 408 else f"status {outcome.status}"
        calm = replace(recovered, bad_requests=0)
        return _pending(calm, duration_s, polled, outcome, _object_of(outcome), failure)
    if outcome.status == 400 and state.bad_requests < MAX_BAD_REQUESTS:
        counted = replace(recovered, bad_requests=state.bad_requests + 1)
        return _pending(counted, duration_s, polled, outcome, {}, "status 400")
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
        return invalid_reply(reply, polled, "protobuf instead of JSON")
    try:
        parsed = json.decode_any(reply.body)
    except json.Malformed as error:
        return invalid_reply(reply, polled, str(error))
    if not isinstance(parsed, dict):
        return invalid_reply(reply, polled, "not a JSON object")
    status = parsed.get("status")
    if parsed.get("type") == "try_again" or status in ("pending", "try_again"):
        return _pending(replace(state, bad_requests=0), duration_s, polled, reply, parsed)
    if status == "complete_metadata":
        if not state.allow_metadata:
            return invalid_reply(reply, polled, "the size of the result instead of the result")
        size = parsed.get("response_payload_size")
        waiting = replace(state, allow_metadata=False, fast_replies=0)
        return PollAgain(0.0, waiting, payload_bytes=size if isinstance(size, int) and size > 0 else 0)
    if status == "failed" or ("error" in parsed and (status is None or parsed["error"] is not None)):
        return Failed(_operation_error(parsed, polled))
    if status == "completed":
        if not isinstance(parsed.get("result"), dict):
            return invalid_reply(reply, polled, f"{shape_of(parsed)}, in which 'result' is not an object")
        parsed = parsed["result"]
    elif "status" in parsed:
        return invalid_reply(reply, polled, f"{shape_of(parsed)}, whose status is unknown")
    if polled.wants_proto:
        return invalid_reply(reply, polled, f"JSON instead of protobuf: {shape_of(parsed)}")
    return Ready(reply, parsed)


def _operation_error(parsed: Mapping[str, Any], polled: Polled) -> RequestFailedError:
    """The error of a failed operation: a text with its category beside it, or an object with both."""
    error, category = parsed.get("error"), parsed.get("category")
    if isinstance(error, dict):
        category = error.get("category", category)
        error = error.get("message") or error.get("error") or "the server gives no reason"
    message = "the server gives no reason" if error is None else str(error)
    return RequestFailedError(message, polled.request_id, RequestErrorCategory.parse(category))


def shape_of(parsed: Mapping[str, Any]) -> str:
    """An object as errors show it: its status or type, and its keys, never their values.

    >>> shape_of({"status": "queued", "place": 3})
    "an object with status 'queued' and the keys 'status', 'place'"
    >>> shape_of({})
    'an empty object'
    """
    if not parsed:
        return "an empty object"
    kinds = [
        f"{name} {parsed[name][:40]!r}" for name in ("status", "type") if isinstance(parsed.get(name), str)
    ]
    names = [repr(str(name)[:40]) for name in list(parsed)[:MAX_SHOWN_KEYS]]
    more = f" and {len(parsed) - MAX_SHOWN_KEYS} more" if len(parsed) > MAX_SHOWN_KEYS else ""
    keys = f"the keys {', '.join(names)}{more}"
    return f"an object with {' and '.join([*kinds, keys])}"


def _is_proto(reply: Reply) -> bool:
    return PROTOBUF in reply.headers.get("content-type", "")


def _pending(
    state: PollState,
    duration_s: float,
    polled: Polled,
    reply: Reply,
    parsed: Mapping[str, Any],
    failure: str | None = None,
) -> PollAgain:
    queue = _queue_state(parsed)
    calm = replace(state, fast_replies=0)
    requested_s = _retry_after_s(parsed)
    if requested_s is not None:
        return PollAgain(requested_s, calm, queue, failure=failure)
    header_s = retry_after(reply.headers, MAX_SERVER_WAIT_S) or 0.0
    if duration_s >= MIN_LONG_POLL_S:
        return PollAgain(header_s, calm, queue, failure=failure)
    if queue is not None and queue[0].startswith("paused"):
        return PollAgain(max(PAUSED_POLL_S, header_s), calm, queue, failure=failure)
    own_s = fast_reply_pause_s(state.fast_replies, polled.backoff)
    fast = replace(state, fast_replies=state.fast_replies + 1)
    return PollAgain(max(own_s, header_s), fast, queue, failure=failure)


def fast_reply_pause_s(num_before: int, backoff: tuple[float, float]) -> float:
    """The wait after a reply without a result that was not a long poll, and came after so many others.

    >>> [fast_reply_pause_s(number, (0.05, 5.0)) for number in (0, 1, 2, 99)]
    [0.05, 0.1, 0.2, 5.0]
    """
    initial_s, max_s = backoff
    return min(initial_s * 2.0 ** min(num_before, 60), max_s)


def _retry_after_s(parsed: Mapping[str, Any]) -> float | None:
    """The wait before the next poll that the server requests; None if it requests none."""
    requested_ms = parsed.get("retry_after_ms")
    if isinstance(requested_ms, int | float) and not isinstance(requested_ms, bool) and requested_ms > 0:
        return min(requested_ms / 1000.0, MAX_SERVER_WAIT_S)
    return None


def _after_failure(state: PollState, failure: str, retry_after_s: float = 0.0) -> PollAgain:
    own = min(2.0 ** min(state.failures, 60), MAX_FAILURE_BACKOFF_S)
    return PollAgain(max(own, retry_after_s), replace(state, failures=state.failures + 1), failure=failure)


def invalid_reply(reply: Reply, polled: Polled, what: str) -> Failed:
    response = HttpResponse(reply.status, reply.headers, "", polled.about)
    message = f"the result of request {polled.request_id} does not follow the protocol: {what}"
    return Failed(APIResponseValidationError(response, None, message))


def _object_of(reply: Reply) -> Mapping[str, Any]:
    """The JSON object in a reply; empty if there is none."""
    try:
        parsed = json.decode_any(reply.body)
    except json.Malformed:
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _queue_state(parsed: Mapping[str, Any]) -> tuple[str, str | None] | None:
    state = parsed.get("queue_state")
    if not isinstance(state, str):
        return None
    state = state.strip().lower()
    known = state if state in {"active", "paused_capacity", "paused_rate_limit"} else "unknown"
    reason = parsed.get("queue_state_reason")
    return known, reason if isinstance(reason, str) else None
