"""Asynchronous operations: requests and responses of submission and retrieval."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, TypeAlias

import msgspec

from tinkex.errors import RequestErrorCategory
from tinkex.types.base import Options, Value
from tinkex.types.coercion import coerce

__all__ = [
    "CancelFutureRequest",
    "FutureCompletion",
    "FutureFailed",
    "FutureFinished",
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
    type: Literal["try_again"] = "try_again"


class RequestFailedResponse(Value, frozen=True, kw_only=True):
    """The operation failed."""

    error: str
    category: RequestErrorCategory = RequestErrorCategory.Unknown


FutureRetrieveResponse: TypeAlias = Any
"""The operation's own response type, ``TryAgainResponse`` or ``RequestFailedResponse``."""


class FutureFinished(Value, frozen=True, kw_only=True, tag_field="state", tag="finished"):
    """A result is ready to be retrieved."""

    state: ClassVar[Literal["finished"]] = "finished"
    request_id: str
    response_payload_uncompressed_size: int | None = None


class FutureFailed(Value, frozen=True, kw_only=True, tag_field="state", tag="failed"):
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
