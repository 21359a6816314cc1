"""Operations that finish later: what submission and retrieval say."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, TypeAlias

import msgspec

from tinkex.errors import RequestErrorCategory
from tinkex.types.base import Options, Value
from tinkex.types.settling import settle

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
    """The answer to a submission: the id under which the result will be found."""

    request_id: RequestID
    model_id: str | None = None
    sample_sequence_ids: list[str] | None = None

    def __post_init__(self) -> None:
        if type(self.request_id) is not str:  # one is made per request: no closer look where all is well
            settle(self)


class FutureRetrieveRequest(Value, frozen=True, kw_only=True):
    """Asks for a result; with ``allow_metadata_only`` a large one may be announced first."""

    request_id: RequestID
    allow_metadata_only: bool = False

    def __post_init__(self) -> None:
        if type(self.request_id) is not str:  # one is made per request: no closer look where all is well
            settle(self)


class CancelFutureRequest(Value, frozen=True, kw_only=True):
    """Says that nobody waits for this result any more."""

    request_id: RequestID


class TryAgainResponse(Value, frozen=True, kw_only=True):
    """Not ready yet, and why."""

    request_id: RequestID = ""
    queue_state: str = "active"
    queue_state_reason: str | None = None
    type: Literal["try_again"] = "try_again"


class RequestFailedResponse(Value, frozen=True, kw_only=True):
    """The operation failed."""

    error: str
    category: RequestErrorCategory = RequestErrorCategory.Unknown


FutureRetrieveResponse: TypeAlias = Any
"""Whatever the operation returns, or one of ``TryAgainResponse`` and ``RequestFailedResponse``."""


class FutureFinished(Value, frozen=True, kw_only=True, tag_field="state", tag="finished"):
    """A result is there to be fetched."""

    state: ClassVar[Literal["finished"]] = "finished"
    request_id: str
    response_payload_uncompressed_size: int | None = None


class FutureFailed(Value, frozen=True, kw_only=True, tag_field="state", tag="failed"):
    """An operation failed; fetching its result says why."""

    state: ClassVar[Literal["failed"]] = "failed"
    request_id: str


FutureCompletion: TypeAlias = FutureFinished | FutureFailed


class SamplingSessionFuturesTarget(Options, frozen=True, kw_only=True):
    """All samples of one process from one sampler."""

    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: str
    cloned_sampler_id: int = 0


class FuturesRetrieveRequest(Options, frozen=True, kw_only=True):
    """Asks what finished since the last time."""

    target: SamplingSessionFuturesTarget
    prev_cursor: int = 0
    timeout: float | None = None
    retrieved_request_ids: list[str] = msgspec.field(default_factory=list)


class FuturesRetrieveResponse(Value, frozen=True, kw_only=True):
    """What finished, and where to go on asking."""

    completions: list[FutureCompletion]
    cursor: int
