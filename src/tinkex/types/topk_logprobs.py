"""``TopkLogprobs``, under the path of the official SDK."""

from tinkex.types import TopkLogprobs

__all__ = ["TopkLogprobs"]
