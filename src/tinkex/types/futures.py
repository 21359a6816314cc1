"""Operations that finish later: what submission and retrieval say."""

from __future__ import annotations

from typing import Literal, TypeAlias

from tinkex.errors import RequestErrorCategory
from tinkex.types.base import Value

__all__ = [
    "CancelFutureRequest",
    "FutureRetrieveRequest",
    "QueueState",
    "RequestErrorCategory",
    "RequestFailedResponse",
    "RequestID",
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


class FutureRetrieveRequest(Value, frozen=True, kw_only=True):
    """Asks for a result; with ``allow_metadata_only`` a large one may be announced first."""

    request_id: RequestID
    allow_metadata_only: bool = False


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
    category: str = "unknown"
