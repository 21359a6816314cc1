"""``CustomLossGraph``, ``CustomLossNode``, ``CustomLossNodeOp``, under the path of the official SDK."""

from tinkex.types import CustomLossGraph, CustomLossNode, CustomLossNodeOp

__all__ = ["CustomLossGraph", "CustomLossNode", "CustomLossNodeOp"]
