"""``CustomLossGraph``, ``CustomLossNode``, under the path of the official SDK."""

from tinkex.types import CustomLossGraph, CustomLossNode

__all__ = ["CustomLossGraph", "CustomLossNode"]
