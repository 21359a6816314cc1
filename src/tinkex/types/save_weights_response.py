"""``SaveWeightsResponse``, under the path of the official SDK."""

from tinkex.types import SaveWeightsResponse

__all__ = ["SaveWeightsResponse"]
