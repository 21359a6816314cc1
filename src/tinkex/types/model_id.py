"""``ModelID``, under the path of the official SDK."""

from tinkex.types import ModelID

__all__ = ["ModelID"]
