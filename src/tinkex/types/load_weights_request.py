"""``LoadWeightsRequest``, under the path of the official SDK."""

from tinkex.types import LoadWeightsRequest

__all__ = ["LoadWeightsRequest"]
