"""``GetSamplerResponse``, under the path of the official SDK."""

from tinkex.types import GetSamplerResponse

__all__ = ["GetSamplerResponse"]
