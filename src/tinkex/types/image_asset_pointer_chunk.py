"""``ImageAssetPointerChunk``, under the path of the official SDK."""

from tinkex.types import ImageAssetPointerChunk

__all__ = ["ImageAssetPointerChunk"]
