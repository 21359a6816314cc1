"""``EncodedTextChunk``, under the path of the official SDK."""

from tinkex.types import EncodedTextChunk

__all__ = ["EncodedTextChunk"]
