"""``TelemetryResponse``, under the path of the official SDK."""

from tinkex.types import TelemetryResponse

__all__ = ["TelemetryResponse"]
