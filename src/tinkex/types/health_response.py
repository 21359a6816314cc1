"""``HealthResponse``, under the path of the official SDK."""

from tinkex.types import HealthResponse

__all__ = ["HealthResponse"]
