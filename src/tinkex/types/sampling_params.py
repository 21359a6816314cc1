"""``SamplingParams``, under the path of the official SDK."""

from tinkex.types import SamplingParams

__all__ = ["SamplingParams"]
