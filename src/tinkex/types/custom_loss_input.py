"""``CustomLossInput``, ``CustomLossInputRank``, under the path of the official SDK."""

from tinkex.types import CustomLossInput, CustomLossInputRank

__all__ = ["CustomLossInput", "CustomLossInputRank"]
