"""``SaveWeightsForSamplerRequest``, under the path of the official SDK."""

from tinkex.types import SaveWeightsForSamplerRequest

__all__ = ["SaveWeightsForSamplerRequest"]
