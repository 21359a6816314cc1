"""``StopReason``, under the path of the official SDK."""

from tinkex.types import StopReason

__all__ = ["StopReason"]
