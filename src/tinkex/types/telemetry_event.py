"""``TelemetryEvent``, under the path of the official SDK."""

from tinkex.types import TelemetryEvent

__all__ = ["TelemetryEvent"]
