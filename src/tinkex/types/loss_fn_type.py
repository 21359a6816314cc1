"""``LossFnType``, under the path of the official SDK."""

from tinkex.types import LossFnType

__all__ = ["LossFnType"]
