"""Files that a client uploads arrive complete on every backend."""

from __future__ import annotations

import asyncio
import hashlib
import io
import secrets
from pathlib import Path

import pytest

import tinkex
from tests.contract.backends import BASE_MODEL, WITH_A_MODEL, Backend
from tinkex import types
from tinkex._transport.multipart import FileForm

pytestmark = pytest.mark.backends(*WITH_A_MODEL)

PNG = b"\x89PNG\r\n\x1a\n"
MIB = 1024 * 1024


class Pipe:
    """A file object that can be read once, such as a socket."""

    def __init__(self, content: bytes) -> None:
        self._content = io.BytesIO(content)

    def read(self, size: int) -> bytes:
        return self._content.read(size)


def test_files_of_every_form_become_part_of_a_prompt(backend: Backend, tmp_path: Path) -> None:
    rest = backend.rest()
    content = PNG + bytes(MIB)
    path = tmp_path / 'cät "1".png'
    path.write_bytes(content)
    forms: list[FileForm] = [path, content, io.BytesIO(content), ("a.png", path), ("pipe", Pipe(content))]
    for form in forms:
        asset = rest.upload_asset(form, ttl_seconds=600).result(60)
        assert (asset.sha256, asset.size_bytes) == (hashlib.sha256(content).hexdigest(), len(content))
    several = rest.upload_assets({"one": path, "two": (None, PNG + b"2")}).result(60)
    assert [asset.name for asset in several] == ["cät %221%22.png", "two"]
    assert rest.get_asset(asset.asset_id).result(30).asset_id == asset.asset_id
    assert {asset.asset_id for asset in several} <= {
        found.asset_id for found in rest.iter_assets(page_size=1)
    }
    chunk = asset.chunk(expected_tokens=3)
    assert (chunk.location, chunk.format, chunk.length) == (asset.location, "png", 3)
    prompt = types.ModelInput(chunks=[chunk, types.EncodedTextChunk(tokens=[5, 6])])
    with backend.service() as service:
        sampler = service.create_sampling_client(base_model=BASE_MODEL)
        with pytest.raises(tinkex.BadRequestError, match="reads text only"):
            sampler.sample(prompt, 1, types.SamplingParams(max_tokens=1)).result(60)
        rest.delete_asset(asset.asset_id).result(30)
        with pytest.raises(tinkex.NotFoundError, match="you have no image"):
            sampler.sample(prompt, 1, types.SamplingParams(max_tokens=1)).result(60)
    rest.delete_asset(several[1].asset_id).result(30)


def test_the_async_api_does_the_same_and_errors_are_typed(backend: Backend) -> None:
    rest = backend.rest()

    async def use() -> None:
        asset, other = await asyncio.gather(
            rest.upload_asset_async(("a.png", PNG + b"a")),
            rest.upload_asset_async(("b.png", io.BytesIO(PNG + b"b"))),
        )
        assert (await rest.get_asset_async(asset.asset_id)).name == "a.png"
        found = [found.asset_id async for found in rest.iter_assets_async()]
        assert {asset.asset_id, other.asset_id} <= set(found)
        assert len((await rest.list_assets_async(limit=1)).assets) == 1
        assert len(await rest.upload_assets_async([PNG + b"a", PNG + b"b"])) == 2
        with pytest.raises(tinkex.BadRequestError, match="neither a PNG nor a JPEG"):
            await rest.upload_asset_async(("a.txt", b"words"))
        for done in (asset, other):
            await rest.delete_asset_async(done.asset_id)
        with pytest.raises(tinkex.NotFoundError):
            await rest.get_asset_async(asset.asset_id)

    asyncio.run(use())


class Large(io.RawIOBase):
    """A file that is too large, made while it is read."""

    def __init__(self, size: int) -> None:
        self.size, self.at = size, 0

    def seekable(self) -> bool:
        return False

    def read(self, size: int = -1) -> bytes:
        count = min(size, self.size - self.at)
        self.at += count
        return (PNG + bytes(count))[:count] if self.at == count else bytes(count)


@pytest.mark.slow
def test_a_file_that_is_too_large_is_rejected_before_it_is_sent_completely(backend: Backend) -> None:
    file = Large(200 * MIB)
    with pytest.raises(tinkex.PayloadTooLargeError, match="limit of 67108864 bytes"):
        backend.rest().upload_asset(("large.png", file)).result(120)
    assert file.at < file.size


def test_a_str_is_never_used_as_a_path_and_a_missing_file_raises_immediately(
    backend: Backend, tmp_path: Path
) -> None:
    rest = backend.rest()
    path = tmp_path / "there.png"
    path.write_bytes(PNG)
    with pytest.raises(tinkex.UploadError, match="a str is ambiguous"):
        rest.upload_asset(str(path))  # type: ignore[arg-type]
    with pytest.raises(tinkex.UploadError, match="cannot be read"):
        rest.upload_asset(tmp_path / "missing.png")
    with pytest.raises(tinkex.UploadError, match="cannot be read"):
        asyncio.run(rest.upload_asset_async(tmp_path / "missing.png"))


class Shrinking(io.BytesIO):
    """A file that is truncated while it is sent."""

    def read(self, size: int | None = -1) -> bytes:
        piece = super().read(size)
        self.truncate(self.tell())
        return piece


class Growing(io.BytesIO):
    """A file that grows while it is sent."""

    def read(self, size: int | None = -1) -> bytes:
        piece, here = super().read(size), self.tell()
        self.seek(0, io.SEEK_END)
        self.write(b"more")
        self.seek(here)
        return piece


class Broken(io.BytesIO):
    """A user-defined file that raises its own error."""

    def read(self, size: int | None = -1) -> bytes:
        if self.tell():
            raise EOFError("the archive is cut short")
        return super().read(size)


class Leaving(io.BytesIO):
    """A user-defined file that raises SystemExit."""

    def read(self, size: int | None = -1) -> bytes:
        raise SystemExit(3)


class Trickling(io.BytesIO):
    """A file with short reads."""

    def read(self, size: int | None = -1) -> bytes:
        return super().read(min(size or 0, 1000))


@pytest.mark.slow
def test_a_file_that_changes_while_it_is_sent_raises_or_is_sent_unchanged(backend: Backend) -> None:
    rest = backend.rest()
    content = PNG + secrets.token_bytes(MIB)
    for changing, message in (
        (Shrinking, "before its expected end"),
        (Broken, "EOFError: the archive is cut short"),
        (Leaving, "SystemExit"),
    ):
        with pytest.raises(tinkex.UploadError, match=message):
            rest.upload_asset(("a.png", changing(content))).result(60)
    for changing in (Growing, Trickling):
        asset = rest.upload_asset(("a.png", changing(content))).result(60)
        assert (asset.size_bytes, asset.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    rest.delete_asset(asset.asset_id).result(30)
