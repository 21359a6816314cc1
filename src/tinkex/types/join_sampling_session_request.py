"""``JoinSamplingSessionRequest``, under the path of the official SDK."""

from tinkex.types import JoinSamplingSessionRequest

__all__ = ["JoinSamplingSessionRequest"]
