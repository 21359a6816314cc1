"""Administration: the audit log, billed usage, and current storage."""

from __future__ import annotations

from datetime import datetime
from typing import Any, ClassVar, Literal, TypeAlias

import msgspec

from tinkex.types.base import Options, TaggedValue, Value

__all__ = [
    "AuditLogEntry",
    "AuditLogResponse",
    "BillingEventInfo",
    "BillingUsageEvent",
    "BillingUsageResponse",
    "BillingUsageSession",
    "CheckpointBillingEvent",
    "CurrentCheckpointStorageUsageItem",
    "CurrentCheckpointStorageUsageResponse",
    "GetBillingUsageRequest",
    "GetCurrentCheckpointStorageUsageRequest",
    "SamplingPrefillBillingEvent",
    "SamplingSampleBillingEvent",
    "StorageBillingEvent",
    "TrainingBillingEvent",
]


class AuditLogEntry(Value, frozen=True, kw_only=True):
    """One audited action."""

    timestamp: datetime
    event: str
    event_details: dict[str, Any] = msgspec.field(default_factory=dict)
    model_id: str | None = None
    tinker_path: str | None = None
    purpose: str | None = None


class AuditLogResponse(Value, frozen=True, kw_only=True):
    """The entries of one day."""

    entries: list[AuditLogEntry]


class TrainingBillingEvent(TaggedValue, frozen=True, kw_only=True, tag_field="type", tag="training"):
    """Tokens of training data."""

    type: ClassVar[Literal["training"]] = "training"
    token_count: int


class SamplingPrefillBillingEvent(
    TaggedValue, frozen=True, kw_only=True, tag_field="type", tag="sampling_prefill"
):
    """Prompt tokens, read from a cache or computed."""

    type: ClassVar[Literal["sampling_prefill"]] = "sampling_prefill"
    cached: bool
    token_count: int


class SamplingSampleBillingEvent(
    TaggedValue, frozen=True, kw_only=True, tag_field="type", tag="sampling_sample"
):
    """Sampled tokens."""

    type: ClassVar[Literal["sampling_sample"]] = "sampling_sample"
    token_count: int


class CheckpointBillingEvent(TaggedValue, frozen=True, kw_only=True, tag_field="type", tag="checkpoint"):
    """Saved checkpoints."""

    type: ClassVar[Literal["checkpoint"]] = "checkpoint"
    count: int


class StorageBillingEvent(TaggedValue, frozen=True, kw_only=True, tag_field="type", tag="storage"):
    """Storage of checkpoints."""

    type: ClassVar[Literal["storage"]] = "storage"
    gigabyte_hours: float
    free: bool | None = False
    """Whether it costs nothing; False where the server does not say. Servers leave out None, for old clients."""


BillingEventInfo: TypeAlias = (
    TrainingBillingEvent
    | SamplingPrefillBillingEvent
    | SamplingSampleBillingEvent
    | CheckpointBillingEvent
    | StorageBillingEvent
)


class BillingUsageEvent(Value, frozen=True, kw_only=True):
    """Usage of one kind in one hour, by one user."""

    bucket_start: datetime
    bucket_end: datetime
    base_model: str | None = None
    user_id: str | None = None
    user_name: str | None = None
    session_id: str | None = None
    project_id: str | None = None
    estimated_cost_usd: float | None = None
    effective_rate_usd_per_million_tokens: float | None = None
    effective_rate_usd_per_gigabyte_month: float | None = None
    event_info: BillingEventInfo


class BillingUsageSession(Value, frozen=True, kw_only=True):
    """The user metadata of a billed session."""

    user_metadata: dict[str, str] | None = None


class BillingUsageResponse(Value, frozen=True, kw_only=True):
    """Usage in a time window, with the metadata of its sessions by id."""

    data: list[BillingUsageEvent]
    sessions: dict[str, BillingUsageSession] = msgspec.field(default_factory=dict)
    cost_data_through: datetime | None = None


class GetBillingUsageRequest(Options, frozen=True, kw_only=True):
    """The time window: from ``starting_on``, up to but not including ``ending_before``."""

    starting_on: datetime
    ending_before: datetime


class GetCurrentCheckpointStorageUsageRequest(Options, frozen=True, kw_only=True):
    """One project, or all."""

    project_id: str | None = None


class CurrentCheckpointStorageUsageItem(Value, frozen=True, kw_only=True):
    """The storage of one user in one project."""

    project_id: str | None = None
    org_user_urn: str | None = None
    user_email: str | None = None
    user_name: str | None = None
    checkpoint_count: int
    size_bytes: int
    size_gigabytes: float
    estimated_monthly_cost_usd: float | None = None


class CurrentCheckpointStorageUsageResponse(Value, frozen=True, kw_only=True):
    """The storage of all users, and its rate."""

    effective_rate_usd_per_gigabyte_month: float | None = None
    data: list[CurrentCheckpointStorageUsageItem]
