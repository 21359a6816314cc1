"""``SampledSequence``, under the path of the official SDK."""

from tinkex.types import SampledSequence

__all__ = ["SampledSequence"]
