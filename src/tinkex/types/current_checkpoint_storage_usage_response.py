"""``CurrentCheckpointStorageUsageItem``, ``CurrentCheckpointStorageUsageResponse``, under the path of the official SDK."""

from tinkex.types import CurrentCheckpointStorageUsageItem, CurrentCheckpointStorageUsageResponse

__all__ = ["CurrentCheckpointStorageUsageItem", "CurrentCheckpointStorageUsageResponse"]
