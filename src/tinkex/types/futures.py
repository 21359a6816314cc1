"""Asynchronous operations: requests and responses of submission and retrieval."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypeAlias

import msgspec

from tinkex.errors import RequestErrorCategory
from tinkex.types.base import Options, TaggedValue, Value
from tinkex.types.coercion import coerce

__all__ = [
    "CancelFutureRequest",
    "FutureCompleteMetadataResponse",
    "FutureCompletedResponse",
    "FutureCompletion",
    "FutureFailed",
    "FutureFailedResponse",
    "FutureFinished",
    "FuturePendingResponse",
    "FutureRetrieveRequest",
    "FutureRetrieveResponse",
    "FuturesRetrieveRequest",
    "FuturesRetrieveResponse",
    "QueueState",
    "RequestErrorCategory",
    "RequestFailedResponse",
    "RequestID",
    "SamplingSessionFuturesTarget",
    "TryAgainResponse",
    "UntypedAPIFuture",
    "parse_future_response",
]

RequestID: TypeAlias = str
QueueState = Literal["active", "paused_capacity", "paused_rate_limit", "unknown"]


class UntypedAPIFuture(Value, frozen=True, kw_only=True):
    """The response to a submission: the request id by which the result is retrieved."""

    request_id: RequestID
    model_id: str | None = None
    sample_sequence_ids: list[str] | None = None

    def __post_init__(self) -> None:
        if type(self.request_id) is not str:  # fast path: one is created per request
            coerce(self)


class FutureRetrieveRequest(Value, frozen=True, kw_only=True):
    """Retrieves a result; with ``allow_metadata_only`` the server may first return the size of a large one."""

    request_id: RequestID
    allow_metadata_only: bool = False

    def __post_init__(self) -> None:
        if type(self.request_id) is not str:  # fast path: one is created per request
            coerce(self)


class CancelFutureRequest(Value, frozen=True, kw_only=True):
    """Cancels an operation whose result is no longer needed."""

    request_id: RequestID


class TryAgainResponse(Value, frozen=True, kw_only=True):
    """The result is not ready; the queue state gives the reason."""

    request_id: RequestID = ""
    queue_state: str = "active"
    queue_state_reason: str | None = None
    retry_after_ms: int | None = None
    """How long to wait before the next poll; None leaves it to the client."""
    type: Literal["try_again"] = "try_again"

    def __post_init__(self) -> None:
        coerce(self)
        if self.retry_after_ms is not None and self.retry_after_ms < 0:
            raise ValueError(f"TryAgainResponse.retry_after_ms must be at least 0, got {self.retry_after_ms}")


class RequestFailedResponse(Value, frozen=True, kw_only=True):
    """The operation failed."""

    error: str
    category: RequestErrorCategory = RequestErrorCategory.Unknown


class FuturePendingResponse(Value, frozen=True, kw_only=True):
    """The operation has not finished."""

    status: Literal["pending"] = "pending"


class FutureCompletedResponse(Value, frozen=True, kw_only=True):
    """The operation has finished, with this result."""

    result: Any
    status: Literal["completed"] = "completed"


class FutureCompleteMetadataResponse(Value, frozen=True, kw_only=True):
    """The operation has finished; its result of this size is returned by a poll without ``allow_metadata_only``."""

    response_payload_size: int = 0
    status: Literal["complete_metadata"] = "complete_metadata"


class FutureFailedResponse(Value, frozen=True, kw_only=True):
    """The operation failed; ``error`` holds a message and a category."""

    error: dict[str, Any]
    status: Literal["failed"] = "failed"

    @property
    def message(self) -> str:
        """What failed."""
        return str(self.error.get("message") or self.error.get("error") or "the operation failed")

    @property
    def category(self) -> RequestErrorCategory:
        """Who is at fault."""
        return RequestErrorCategory.parse(self.error.get("category"))


FutureRetrieveResponse: TypeAlias = Any
"""The operation's own response type, ``TryAgainResponse`` or ``RequestFailedResponse``."""

_STATUSES: Mapping[str, type[Value]] = {
    "pending": FuturePendingResponse,
    "completed": FutureCompletedResponse,
    "complete_metadata": FutureCompleteMetadataResponse,
    "failed": FutureFailedResponse,
}


def parse_future_response(
    body: Mapping[str, Any],
) -> (
    TryAgainResponse
    | FuturePendingResponse
    | FutureCompletedResponse
    | FutureCompleteMetadataResponse
    | FutureFailedResponse
    | RequestFailedResponse
):
    """Returns what the JSON answer of ``retrieve_future`` says, for programs that poll by themselves.

    A plain result, which carries no ``status``, becomes a ``FutureCompletedResponse``; an unknown status raises ``ValueError``.

    >>> parse_future_response({"type": "try_again", "queue_state": "paused_capacity", "retry_after_ms": 500}).retry_after_ms
    500
    >>> parse_future_response({"path": "tinker://run-1/weights/a"}).result
    {'path': 'tinker://run-1/weights/a'}
    """
    status = body.get("status")
    if "try_again" in (body.get("type"), status):
        return TryAgainResponse.model_validate({**body, "type": "try_again"})
    if "status" in body and status not in _STATUSES:
        raise ValueError(f"the status of an operation is {', '.join(_STATUSES)}; got {status!r}")
    if isinstance(body.get("error"), str):
        return RequestFailedResponse(
            error=body["error"], category=RequestErrorCategory.parse(body.get("category"))
        )
    if status is None:
        return FutureCompletedResponse(result=dict(body))
    if status == "completed" and not isinstance(body.get("result"), Mapping):
        raise ValueError("a completed operation has an object as its 'result'")
    if status == "failed" and body.get("error") is None:
        body = {**body, "error": {}}  # the server gives no reason
    kind: Any = _STATUSES[status]
    parsed: FuturePendingResponse = kind.model_validate(body)
    return parsed


class FutureFinished(TaggedValue, frozen=True, kw_only=True, tag_field="state", tag="finished"):
    """A result is ready to be retrieved."""

    state: ClassVar[Literal["finished"]] = "finished"
    request_id: str
    response_payload_uncompressed_size: int | None = None


class FutureFailed(TaggedValue, frozen=True, kw_only=True, tag_field="state", tag="failed"):
    """An operation failed; retrieving its result returns the error."""

    state: ClassVar[Literal["failed"]] = "failed"
    request_id: str


FutureCompletion: TypeAlias = FutureFinished | FutureFailed


class SamplingSessionFuturesTarget(Options, frozen=True, kw_only=True):
    """All samples of one process from one sampler."""

    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: str
    cloned_sampler_id: int = 0


class FuturesRetrieveRequest(Options, frozen=True, kw_only=True):
    """Retrieves the operations that finished since ``prev_cursor``."""

    target: SamplingSessionFuturesTarget
    prev_cursor: int = 0
    timeout: float | None = None
    retrieved_request_ids: list[str] = msgspec.field(default_factory=list)


class FuturesRetrieveResponse(Value, frozen=True, kw_only=True):
    """Finished operations, and the cursor for the next request."""

    completions: list[FutureCompletion]
    cursor: int
