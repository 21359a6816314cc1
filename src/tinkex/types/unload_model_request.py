"""``UnloadModelRequest``, under the path of the official SDK."""

from tinkex.types import UnloadModelRequest

__all__ = ["UnloadModelRequest"]
