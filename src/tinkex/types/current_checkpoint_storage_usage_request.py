"""``GetCurrentCheckpointStorageUsageRequest``, under the path of the official SDK."""

from tinkex.types import GetCurrentCheckpointStorageUsageRequest

__all__ = ["GetCurrentCheckpointStorageUsageRequest"]
