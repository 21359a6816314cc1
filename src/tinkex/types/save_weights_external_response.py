"""``SaveWeightsExternalResponse``, ``SaveWeightsExternalResponseInternal``, under the path of the official SDK."""

from tinkex.types import SaveWeightsExternalResponse, SaveWeightsExternalResponseInternal

__all__ = ["SaveWeightsExternalResponse", "SaveWeightsExternalResponseInternal"]
