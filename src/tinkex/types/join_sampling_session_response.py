"""``JoinSamplingSessionResponse``, under the path of the official SDK."""

from tinkex.types import JoinSamplingSessionResponse

__all__ = ["JoinSamplingSessionResponse"]
