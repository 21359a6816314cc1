"""``CreateModelRequest``, under the path of the official SDK."""

from tinkex.types import CreateModelRequest

__all__ = ["CreateModelRequest"]
