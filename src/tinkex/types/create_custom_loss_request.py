"""``CreateCustomLossRequest``, under the path of the official SDK."""

from tinkex.types import CreateCustomLossRequest

__all__ = ["CreateCustomLossRequest"]
