"""``ImageChunk``, under the path of the official SDK."""

from tinkex.types import ImageChunk

__all__ = ["ImageChunk"]
