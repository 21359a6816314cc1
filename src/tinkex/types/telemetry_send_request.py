"""``TelemetrySendRequest``, under the path of the official SDK."""

from tinkex.types import TelemetrySendRequest

__all__ = ["TelemetrySendRequest"]
