"""The part of the REST client that uploads and manages images, which prompts can refer to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tinkex import types
from tinkex._transport.multipart import FileForm, FileForms, Form
from tinkex.clients._docstrings import documented
from tinkex.clients._paging import PageIterator, by_offset
from tinkex.clients._twins import async_form, async_iterator

if TYPE_CHECKING:
    from tinkex.clients._rest_calls import RestCalls
    from tinkex.futures import AwaitableConcurrentFuture

__all__ = ["AssetMethods"]


@documented("rest")
class AssetMethods:
    """Uploads images, and manages uploaded ones."""

    _calls: RestCalls

    def upload_asset(
        self, file: FileForm, ttl_seconds: int | None = None, timeout: float | None = None
    ) -> AwaitableConcurrentFuture[types.Asset]:
        """Uploads a PNG or JPEG image; ``.result().chunk()`` is what a prompt refers to it with.

        ::

            asset = rest.upload_asset(Path("cat.png")).result()
            prompt = ModelInput(chunks=[asset.chunk(expected_tokens=64), *text.chunks])

        ``file`` is a path, bytes, a file object opened with ``"rb"``, or ``(name, content[, content_type[,
        headers]])`` with one of these as content. A ``str`` is rejected, because it is ambiguous. Large files
        are read while they are sent. ``timeout`` bounds each wait for progress. A failed upload is retried
        unless it has read a file object that cannot be rewound.
        """
        form = _form([file], ttl_seconds)
        return self._calls.start(self._calls.upload_asset(form, timeout))

    upload_asset_async = async_form(upload_asset)

    def upload_assets(
        self, files: FileForms, ttl_seconds: int | None = None, timeout: float | None = None
    ) -> AwaitableConcurrentFuture[list[types.Asset]]:
        """Uploads several images in one request, in their order; the server stores all of them, or none.

        ``files`` is a list of what :meth:`upload_asset` takes, or a mapping from names to them.
        """
        form = _form(files, ttl_seconds)
        return self._calls.start(self._calls.upload_assets(form, timeout))

    upload_assets_async = async_form(upload_assets)

    def get_asset(self, asset_id: str) -> AwaitableConcurrentFuture[types.Asset]:
        """The properties of an image."""
        return self._calls.start(self._calls.asset(asset_id))

    get_asset_async = async_form(get_asset)

    def list_assets(
        self, limit: int = 100, offset: int = 0
    ) -> AwaitableConcurrentFuture[types.AssetsListResponse]:
        """A page of the images of this key, newest first."""
        return self._calls.start(self._calls.assets(limit, offset))

    list_assets_async = async_form(list_assets)

    def iter_assets(self, page_size: int = 100) -> PageIterator[types.AssetsListResponse, types.Asset]:
        """Every image of this key; pages are requested as they are needed."""
        return by_offset(lambda offset: self.list_assets(page_size, offset), lambda page: page.assets)

    iter_assets_async = async_iterator(iter_assets)

    def delete_asset(self, asset_id: str) -> AwaitableConcurrentFuture[None]:
        """Deletes an image; the server then rejects prompts that refer to it."""
        return self._calls.start(self._calls.delete_asset(asset_id))

    delete_asset_async = async_form(delete_asset)


def _form(files: Mapping[str, FileForm] | Sequence[FileForm], ttl_seconds: int | None) -> Form:
    return Form({} if ttl_seconds is None else {"ttl_seconds": str(ttl_seconds)}, files)
