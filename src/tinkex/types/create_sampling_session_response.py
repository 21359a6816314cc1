"""``CreateSamplingSessionResponse``, under the path of the official SDK."""

from tinkex.types import CreateSamplingSessionResponse

__all__ = ["CreateSamplingSessionResponse"]
