"""``CopyWeightsResponse``, under the path of the official SDK."""

from tinkex.types import CopyWeightsResponse

__all__ = ["CopyWeightsResponse"]
