"""Searches of sessions and of checkpoints: queries, pages, and sessions with their status."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, ClassVar, Literal, TypeAlias

import msgspec

from tinkex.types.base import Options, TaggedOptions, TaggedValue, Value
from tinkex.types.checkpoints import Checkpoint, CheckpointType
from tinkex.types.coercion import coerce

__all__ = [
    "AccessibleSearchOwner",
    "ActiveSessionStatusQuery",
    "CancelledSessionStatusQuery",
    "CheckpointSearchCursor",
    "CheckpointSearchRequest",
    "CheckpointSearchResponse",
    "ClientFinishedSessionStatusQuery",
    "ClientSessionFinishErrored",
    "ClientSessionFinishInterrupted",
    "ClientSessionFinishReason",
    "ClientSessionFinishReasonType",
    "ClientSessionFinishSuccess",
    "ClientSessionFinished",
    "FailedSessionStatusQuery",
    "OwnSearchOwner",
    "SearchOwner",
    "SessionActive",
    "SessionCancelled",
    "SessionFailed",
    "SessionFailedReason",
    "SessionFailedRequestReason",
    "SessionFailedSamplingSessionReason",
    "SessionFailedTrainingRunReason",
    "SessionSearchCursor",
    "SessionSearchRequest",
    "SessionSearchResponse",
    "SessionStatus",
    "SessionStatusQuery",
    "SessionSummary",
    "UserSearchOwner",
]

ClientSessionFinishReasonType = Literal["success", "errored", "interrupted"]


class OwnSearchOwner(TaggedOptions, frozen=True, kw_only=True, tag_field="type", tag="own"):
    """What belongs to the caller."""

    type: ClassVar[Literal["own"]] = "own"


class AccessibleSearchOwner(TaggedOptions, frozen=True, kw_only=True, tag_field="type", tag="accessible"):
    """What the caller may read."""

    type: ClassVar[Literal["accessible"]] = "accessible"


class UserSearchOwner(TaggedOptions, frozen=True, kw_only=True, tag_field="type", tag="user"):
    """What belongs to up to ten named users."""

    type: ClassVar[Literal["user"]] = "user"
    owner_urns: list[str]

    def __post_init__(self) -> None:
        coerce(self)
        if not 1 <= len(self.owner_urns) <= 10:
            raise ValueError(f"UserSearchOwner takes 1 to 10 owner_urns, got {len(self.owner_urns)}")


SearchOwner: TypeAlias = OwnSearchOwner | AccessibleSearchOwner | UserSearchOwner


class ActiveSessionStatusQuery(TaggedOptions, frozen=True, kw_only=True, tag_field="type", tag="active"):
    """Sessions that are active."""

    type: ClassVar[Literal["active"]] = "active"


class CancelledSessionStatusQuery(
    TaggedOptions, frozen=True, kw_only=True, tag_field="type", tag="cancelled"
):
    """Sessions that were cancelled."""

    type: ClassVar[Literal["cancelled"]] = "cancelled"


class FailedSessionStatusQuery(TaggedOptions, frozen=True, kw_only=True, tag_field="type", tag="failed"):
    """Sessions that failed on the server."""

    type: ClassVar[Literal["failed"]] = "failed"


class ClientFinishedSessionStatusQuery(
    TaggedOptions, frozen=True, kw_only=True, tag_field="type", tag="client_finished"
):
    """Sessions that their program closed, for any reason or for the given ones."""

    type: ClassVar[Literal["client_finished"]] = "client_finished"
    reasons: list[ClientSessionFinishReasonType] | None = None

    def __post_init__(self) -> None:
        coerce(self)
        if self.reasons is not None and not self.reasons:
            raise ValueError("reasons must be a non-empty list, or None for any")


SessionStatusQuery: TypeAlias = (
    ActiveSessionStatusQuery
    | CancelledSessionStatusQuery
    | FailedSessionStatusQuery
    | ClientFinishedSessionStatusQuery
)


class SessionSearchCursor(Value, frozen=True, kw_only=True):
    """The position of the next page."""

    last_created_at: Annotated[datetime, msgspec.Meta(tz=True)]
    last_session_id: str

    def __post_init__(self) -> None:
        coerce(self)
        if self.last_created_at.tzinfo is None:
            raise ValueError("SessionSearchCursor.last_created_at needs a time zone")


class SessionSearchRequest(Options, frozen=True, kw_only=True):
    """A session query, with the page size (1 to 200).

    >>> SessionSearchRequest(display_name="nightly").limit
    50
    """

    session_id: str | None = None
    project_ids: list[str] | None = None
    user_metadata: dict[str, str] = msgspec.field(default_factory=dict)
    display_name: str | None = None
    owner: SearchOwner = OwnSearchOwner()
    statuses: list[SessionStatusQuery] | None = None
    limit: int = 50
    cursor: SessionSearchCursor | None = None

    def __post_init__(self) -> None:
        coerce(self)
        if not 1 <= self.limit <= 200:
            raise ValueError(f"SessionSearchRequest.limit must be in 1…200, got {self.limit}")
        if self.display_name == "":
            raise ValueError("SessionSearchRequest.display_name must be a non-empty string, or None")
        if self.statuses is not None and not self.statuses:
            raise ValueError("SessionSearchRequest.statuses must be a non-empty list, or None for any")


class ClientSessionFinishSuccess(TaggedValue, frozen=True, kw_only=True, tag_field="type", tag="success"):
    """The program succeeded."""

    type: ClassVar[Literal["success"]] = "success"


class ClientSessionFinishErrored(TaggedValue, frozen=True, kw_only=True, tag_field="type", tag="errored"):
    """The program ended with an exception."""

    type: ClassVar[Literal["errored"]] = "errored"


class ClientSessionFinishInterrupted(
    TaggedValue, frozen=True, kw_only=True, tag_field="type", tag="interrupted"
):
    """The program was interrupted."""

    type: ClassVar[Literal["interrupted"]] = "interrupted"


ClientSessionFinishReason: TypeAlias = (
    ClientSessionFinishSuccess | ClientSessionFinishErrored | ClientSessionFinishInterrupted
)


class SessionFailedRequestReason(TaggedValue, frozen=True, kw_only=True, tag_field="type", tag="request"):
    """A request failed."""

    type: ClassVar[Literal["request"]] = "request"
    request_id: str
    request_type: str


class SessionFailedTrainingRunReason(
    TaggedValue, frozen=True, kw_only=True, tag_field="type", tag="training_run"
):
    """A training run failed."""

    type: ClassVar[Literal["training_run"]] = "training_run"
    training_run_id: str


class SessionFailedSamplingSessionReason(
    TaggedValue, frozen=True, kw_only=True, tag_field="type", tag="sampling_session"
):
    """A sampler failed."""

    type: ClassVar[Literal["sampling_session"]] = "sampling_session"
    sampling_session_id: str


SessionFailedReason: TypeAlias = (
    SessionFailedRequestReason | SessionFailedTrainingRunReason | SessionFailedSamplingSessionReason
)


class SessionFailed(TaggedValue, frozen=True, kw_only=True, tag_field="type", tag="failed"):
    """The session failed on the server."""

    type: ClassVar[Literal["failed"]] = "failed"
    category: Literal["user", "internal"]
    reason: SessionFailedReason
    message: str


class SessionCancelled(TaggedValue, frozen=True, kw_only=True, tag_field="type", tag="cancelled"):
    """The session was cancelled."""

    type: ClassVar[Literal["cancelled"]] = "cancelled"
    detail: str | None = None


class ClientSessionFinished(TaggedValue, frozen=True, kw_only=True, tag_field="type", tag="client_finished"):
    """The program closed the session."""

    type: ClassVar[Literal["client_finished"]] = "client_finished"
    reason: ClientSessionFinishReason
    detail: str | None = None


class SessionActive(TaggedValue, frozen=True, kw_only=True, tag_field="type", tag="active"):
    """The session is active."""

    type: ClassVar[Literal["active"]] = "active"


SessionStatus: TypeAlias = SessionFailed | SessionCancelled | ClientSessionFinished | SessionActive


class SessionSummary(Value, frozen=True, kw_only=True):
    """One search result."""

    session_id: str
    created_at: datetime
    owner: str
    project_id: str
    status: SessionStatus | None = None
    checkpoints_count: int
    display_name: str | None = None
    user_metadata: dict[str, str] | None = None
    checkpoint_storage_bytes: int | None = None


class SessionSearchResponse(Value, frozen=True, kw_only=True):
    """A page of sessions, newest first."""

    sessions: list[SessionSummary]
    next_cursor: SessionSearchCursor | None = None


class CheckpointSearchCursor(Value, frozen=True, kw_only=True):
    """The position of the next page; pass it back unchanged."""

    last_created_at: Annotated[datetime, msgspec.Meta(tz=True)]
    last_checkpoint_uuid: str

    def __post_init__(self) -> None:
        coerce(self)
        if self.last_created_at.tzinfo is None:
            raise ValueError("CheckpointSearchCursor.last_created_at needs a time zone")


class CheckpointSearchRequest(Options, frozen=True, kw_only=True):
    """A checkpoint query, with the page size (1 to 200); all filters must match.

    ``project_ids`` and ``base_models`` match any of their items, and None matches all. Every item of ``user_metadata`` must
    be in the checkpoint's.

    >>> CheckpointSearchRequest(checkpoint_type="external", user_metadata={"stage": "sft"}).limit
    50
    """

    project_ids: list[str] | None = None
    user_metadata: dict[str, str] = msgspec.field(default_factory=dict)
    checkpoint_type: CheckpointType | None = None
    owner: SearchOwner = OwnSearchOwner()
    base_models: list[str] | None = None
    limit: int = 50
    cursor: CheckpointSearchCursor | None = None

    def __post_init__(self) -> None:
        coerce(self)
        if not 1 <= self.limit <= 200:
            raise ValueError(f"CheckpointSearchRequest.limit must be in 1…200, got {self.limit}")


class CheckpointSearchResponse(Value, frozen=True, kw_only=True):
    """A page of checkpoints, newest first."""

    checkpoints: list[Checkpoint]
    next_cursor: CheckpointSearchCursor | None = None
