"""``CreateSamplingSessionRequest``, under the path of the official SDK."""

from tinkex.types import CreateSamplingSessionRequest

__all__ = ["CreateSamplingSessionRequest"]
