"""``SaveWeightsForSamplerResponse``, ``SaveWeightsForSamplerResponseInternal``, under the path of the official SDK."""

from tinkex.types import SaveWeightsForSamplerResponse, SaveWeightsForSamplerResponseInternal

__all__ = ["SaveWeightsForSamplerResponse", "SaveWeightsForSamplerResponseInternal"]
