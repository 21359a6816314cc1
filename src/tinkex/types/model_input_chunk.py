"""``ModelInputChunk``, under the path of the official SDK."""

from tinkex.types import ModelInputChunk

__all__ = ["ModelInputChunk"]
