"""``SaveWeightsExternalRequest``, under the path of the official SDK."""

from tinkex.types import SaveWeightsExternalRequest

__all__ = ["SaveWeightsExternalRequest"]
