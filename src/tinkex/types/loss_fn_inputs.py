"""``LossFnInputs``, under the path of the official SDK."""

from tinkex.types import LossFnInputs

__all__ = ["LossFnInputs"]
