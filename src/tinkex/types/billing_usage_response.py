"""``BillingEventInfo``, ``BillingUsageEvent``, ``BillingUsageResponse``, ``BillingUsageSession``, ``CheckpointBillingEvent``, ``SamplingPrefillBillingEvent``, ``SamplingSampleBillingEvent``, ``StorageBillingEvent``, ``TrainingBillingEvent``, under the path of the official SDK."""

from tinkex.types import (
    BillingEventInfo,
    BillingUsageEvent,
    BillingUsageResponse,
    BillingUsageSession,
    CheckpointBillingEvent,
    SamplingPrefillBillingEvent,
    SamplingSampleBillingEvent,
    StorageBillingEvent,
    TrainingBillingEvent,
)

__all__ = [
    "BillingEventInfo",
    "BillingUsageEvent",
    "BillingUsageResponse",
    "BillingUsageSession",
    "CheckpointBillingEvent",
    "SamplingPrefillBillingEvent",
    "SamplingSampleBillingEvent",
    "StorageBillingEvent",
    "TrainingBillingEvent",
]
