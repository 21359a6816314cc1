"""``OptimStepResponse``, under the path of the official SDK."""

from tinkex.types import OptimStepResponse

__all__ = ["OptimStepResponse"]
