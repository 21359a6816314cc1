"""Files on a server: images that prompts can refer to."""

from __future__ import annotations

from datetime import datetime

from tinkex.types.base import Value
from tinkex.types.checkpoints import Cursor
from tinkex.types.inputs import ImageAssetPointerChunk, ImageFormat

__all__ = ["Asset", "AssetsListResponse", "AssetsResponse"]


class Asset(Value, frozen=True, kw_only=True):
    """One uploaded image; the same content uploaded again is the same asset.

    >>> asset = Asset(
    ...     asset_id="0a1b", location="asset://0a1b", name="cat.png", format="png", size_bytes=8, sha256="0a1b…",
    ...     created_at=datetime(2026, 1, 1), expires_at=datetime(2026, 2, 1),
    ... )
    >>> asset.chunk(expected_tokens=64).location
    'asset://0a1b'
    """

    asset_id: str
    location: str
    """The ``location`` of an image chunk."""
    name: str
    format: ImageFormat
    size_bytes: int
    sha256: str
    created_at: datetime
    expires_at: datetime

    def chunk(self, expected_tokens: int | None = None) -> ImageAssetPointerChunk:
        """Returns a chunk that refers to the image, without its bytes."""
        return ImageAssetPointerChunk(
            location=self.location, format=self.format, expected_tokens=expected_tokens
        )


class AssetsResponse(Value, frozen=True, kw_only=True):
    """The assets of an upload, in the order of its files."""

    assets: list[Asset]


class AssetsListResponse(Value, frozen=True, kw_only=True):
    """A page of assets, newest first."""

    assets: list[Asset]
    cursor: Cursor
