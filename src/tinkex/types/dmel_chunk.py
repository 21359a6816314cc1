"""``DmelChunk``, under the path of the official SDK."""

from tinkex.types import DmelChunk

__all__ = ["DmelChunk"]
