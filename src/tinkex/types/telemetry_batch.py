"""``TelemetryBatch``, under the path of the official SDK."""

from tinkex.types import TelemetryBatch

__all__ = ["TelemetryBatch"]
