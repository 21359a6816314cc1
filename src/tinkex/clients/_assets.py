"""The part of the REST client that deals with files: images that prompts can point to."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from tinkex import types
from tinkex._runtime import await_future, background
from tinkex._transport.multipart import FileForm, FileForms, Form

if TYPE_CHECKING:
    from tinkex.clients._rest_calls import RestCalls

__all__ = ["AssetMethods"]


class AssetMethods:
    """Uploading images, and managing what was uploaded."""

    _calls: RestCalls

    def upload_asset(
        self, file: FileForm, ttl_seconds: int | None = None, timeout: float | None = None
    ) -> Future[types.Asset]:
        """Uploads a PNG or JPEG image; ``.result().chunk()`` is what a prompt points to it with.

        ::

            asset = rest.upload_asset(Path("cat.png")).result()
            prompt = ModelInput(chunks=[asset.chunk(expected_tokens=64), *text.chunks])

        ``file`` is a path, bytes, a file object opened with ``"rb"``, or ``(name, content[, content_type[,
        headers]])`` with one of these as content. A ``str`` is refused: it could be meant as either. Large files
        are read while they are sent. ``timeout`` bounds each wait for progress. A failed upload is tried again
        unless a file object was read that cannot be rewound.
        """
        form = _form([file], ttl_seconds)
        return background().submit(self._calls.upload_asset(form, timeout))

    async def upload_asset_async(
        self, file: FileForm, ttl_seconds: int | None = None, timeout: float | None = None
    ) -> types.Asset:
        """As :meth:`upload_asset`."""
        form = _form([file], ttl_seconds)
        return await await_future(
            background().submit(self._calls.upload_asset(form, timeout)), propagate_cancel=True
        )

    def upload_assets(
        self, files: FileForms, ttl_seconds: int | None = None, timeout: float | None = None
    ) -> Future[list[types.Asset]]:
        """Uploads several images in one request, in their order; all of them are kept, or none.

        ``files`` is a list of what :meth:`upload_asset` takes, or a mapping from names to them.
        """
        form = _form(files, ttl_seconds)
        return background().submit(self._calls.upload_assets(form, timeout))

    async def upload_assets_async(
        self, files: FileForms, ttl_seconds: int | None = None, timeout: float | None = None
    ) -> list[types.Asset]:
        """As :meth:`upload_assets`."""
        form = _form(files, ttl_seconds)
        return await await_future(
            background().submit(self._calls.upload_assets(form, timeout)), propagate_cancel=True
        )

    def get_asset(self, asset_id: str) -> Future[types.Asset]:
        """What is known about an image."""
        return background().submit(self._calls.asset(asset_id))

    async def get_asset_async(self, asset_id: str) -> types.Asset:
        """As :meth:`get_asset`."""
        return await await_future(background().submit(self._calls.asset(asset_id)), propagate_cancel=True)

    def list_assets(self, limit: int = 100, offset: int = 0) -> Future[types.AssetsListResponse]:
        """A page of the images of this key, newest first."""
        return background().submit(self._calls.assets(limit, offset))

    async def list_assets_async(self, limit: int = 100, offset: int = 0) -> types.AssetsListResponse:
        """As :meth:`list_assets`."""
        return await await_future(
            background().submit(self._calls.assets(limit, offset)), propagate_cancel=True
        )

    def iter_assets(self, page_size: int = 100) -> Iterator[types.Asset]:
        """Every image of this key; pages are fetched as they are needed."""
        offset = 0
        while page := self.list_assets(page_size, offset).result().assets:
            yield from page
            offset += len(page)

    async def iter_assets_async(self, page_size: int = 100) -> AsyncIterator[types.Asset]:
        """As :meth:`iter_assets`, with ``async for``."""
        offset = 0
        while page := (await self.list_assets_async(page_size, offset)).assets:
            for asset in page:
                yield asset
            offset += len(page)

    def delete_asset(self, asset_id: str) -> Future[None]:
        """Deletes an image; prompts that point to it are refused from then on."""
        return background().submit(self._calls.delete_asset(asset_id))

    async def delete_asset_async(self, asset_id: str) -> None:
        """As :meth:`delete_asset`."""
        await await_future(background().submit(self._calls.delete_asset(asset_id)), propagate_cancel=True)


def _form(files: Mapping[str, FileForm] | Sequence[FileForm], ttl_seconds: int | None) -> Form:
    return Form({} if ttl_seconds is None else {"ttl_seconds": str(ttl_seconds)}, files)
