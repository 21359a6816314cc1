"""``SaveWeightsRequest``, under the path of the official SDK."""

from tinkex.types import SaveWeightsRequest

__all__ = ["SaveWeightsRequest"]
