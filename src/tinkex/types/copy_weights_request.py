"""``CopyWeightsRequest``, under the path of the official SDK."""

from tinkex.types import CopyWeightsRequest

__all__ = ["CopyWeightsRequest"]
