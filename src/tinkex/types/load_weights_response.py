"""``LoadWeightsResponse``, under the path of the official SDK."""

from tinkex.types import LoadWeightsResponse

__all__ = ["LoadWeightsResponse"]
