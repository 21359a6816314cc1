"""``CheckpointsListResponse``, under the path of the official SDK."""

from tinkex.types import CheckpointsListResponse

__all__ = ["CheckpointsListResponse"]
