"""Image uploads: streamed to disk, and committed all together or not at all."""

from __future__ import annotations

import hashlib
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from tinkex.engine.config import EngineConfig
from tinkex.engine.quotas import check_new_bytes
from tinkex.engine.store import AssetRow, Store
from tinkex.errors import InvalidInput, NoRoom, StorageUnavailable, TooLarge, UnknownObject
from tinkex.types import ImageAssetPointerChunk, ModelInput

SCHEME = "asset://"
MAX_FILES = 64
"""Images per upload."""
MAX_NAME_LENGTH = 255
ID_DIGITS = 32

SIGNATURES = {"png": b"\x89PNG\r\n\x1a\n", "jpeg": b"\xff\xd8\xff"}
"""The magic bytes of each image format that prompts may contain."""
MEDIA_TYPES = {"png": {"image/png"}, "jpeg": {"image/jpeg", "image/jpg"}}
UNTYPED = frozenset({"", "application/octet-stream"})


def detect_format(start: bytes) -> str | None:
    """Returns the format of an image by its first bytes, or None.

    >>> detect_format(bytes([0xFF, 0xD8, 0xFF, 0xE0])), detect_format(b"GIF89a")
    ('jpeg', None)
    """
    return next((name for name, signature in SIGNATURES.items() if start.startswith(signature)), None)


@dataclass
class _UploadedFile:
    """One file of an upload."""

    name: str
    content_type: str
    temporary: Path
    stream: IO[bytes]
    size: int = 0
    start: bytes = b""
    digest: hashlib._Hash = field(default_factory=hashlib.sha256)


class AssetUpload:
    """Writes the files of one upload; they are deleted unless :meth:`commit` succeeds. Safe on any thread."""

    def __init__(self, config: EngineConfig, store: Store, owner: str) -> None:
        self._config, self._store, self._owner = config, store, owner
        self._lock = threading.Lock()
        self._files: list[_UploadedFile] = []
        self._total = 0
        self._closed = False

    def begin(self, name: str, content_type: str) -> None:
        """Start a file."""
        with self._lock:
            self._check_open()
            if len(self._files) >= MAX_FILES:
                raise TooLarge(f"an upload has at most {MAX_FILES} files; send the rest in another upload.")
            temporary = self._store.directories.new_asset_path()
            try:
                stream = temporary.open("xb", buffering=0)
            except OSError as error:
                raise _write_error(error) from error
            self._files.append(_UploadedFile(name[:MAX_NAME_LENGTH], content_type, temporary, stream))

    def write(self, data: bytes) -> None:
        """Add data to the current file."""
        with self._lock:
            self._check_open()
            file, max_bytes = self._files[-1], self._config.max_asset_bytes
            if file.size + len(data) > max_bytes:
                raise TooLarge(
                    f"{file.name!r} is larger than this server's limit of {max_bytes} bytes for an image."
                )
            max_total = min(
                filter(None, (self._config.max_disk_bytes, self._config.max_disk_bytes_per_user)),
                default=None,
            )
            if max_total is not None and self._total + len(data) > max_total:
                raise NoRoom(f"this upload is larger than the storage limit of {max_total} bytes; send less.")
            if len(file.start) < len(SIGNATURES["png"]):
                file.start += data[: len(SIGNATURES["png"])]
            file.digest.update(data)
            try:
                left = memoryview(data)
                while left:
                    left = left[file.stream.write(left) :]
            except OSError as error:
                raise _write_error(error) from error
            file.size += len(data)
            self._total += len(data)

    def end(self) -> None:
        """Finish the current file; raises ``InvalidInput`` if it is not an image."""
        with self._lock:
            self._check_open()
            file = self._files[-1]
            file.stream.close()
            found = detect_format(file.start)
            if found is None:
                raise InvalidInput(
                    f"{file.name!r} is neither a PNG nor a JPEG image; other formats are not supported."
                )
            media_type = file.content_type.partition(";")[0].strip().lower()
            if media_type not in UNTYPED and media_type not in MEDIA_TYPES[found]:
                raise InvalidInput(
                    f"{file.name!r} has content type {media_type}, but its content is {found}; send it as image/{found}."
                )

    def commit(self, ttl_seconds: float | None) -> list[AssetRow]:
        """Store all files as assets of their owner."""
        now = time.time()
        with self._lock:
            self._check_open()
            if not self._files:
                raise InvalidInput("this upload has no file; add one with a filename.")
            rows: list[AssetRow] = []
            replaced: list[str | None] = []
            try:
                for file in self._files:
                    digest = file.digest.hexdigest()
                    rows.append(
                        AssetRow(
                            owner=self._owner,
                            asset_id=digest[:ID_DIGITS],
                            name=file.name,
                            format=detect_format(file.start) or "",
                            size_bytes=file.size,
                            sha256=digest,
                            file=self._store.directories.commit_asset(file.temporary),
                            created_at=now,
                            expires_at=now + (ttl_seconds or self._config.asset_retention_s),
                        )
                    )
                with self._store.database.transaction():
                    # In one transaction, so that the quota holds. A repeated upload replaces the first.
                    new = {row.asset_id: row.size_bytes for row in rows}
                    old = [self._store.assets.get(self._owner, asset_id, now) for asset_id in new]
                    more = sum(new.values()) - sum(row.size_bytes for row in old if row is not None)
                    check_new_bytes(self._config, self._store, self._owner, more)
                    replaced = [self._store.assets.put(row) for row in rows]
            except BaseException as error:
                for row in rows:
                    self._store.directories.remove_asset(row.file)
                if isinstance(error, OSError):
                    raise _write_error(error) from error
                raise
            self._closed = True
        for path in filter(None, replaced):
            self._store.directories.remove_asset(path)
        return rows

    def discard(self) -> None:
        """Delete the files, unless they were committed."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for file in self._files:
                    file.stream.close()
                    file.temporary.unlink(missing_ok=True)

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidInput("this upload is closed.")


def location_of(asset_id: str) -> str:
    """Returns the location of an asset, as used in image chunks.

    >>> location_of("0a1b")
    'asset://0a1b'
    """
    return f"{SCHEME}{asset_id}"


def find_asset(store: Store, owner: str, asset_id: str) -> AssetRow:
    """Returns a user's live asset; raises :class:`UnknownObject`, also for other users' assets."""
    row = store.assets.get(owner, asset_id, time.time())
    if row is None:
        raise UnknownObject(
            f"you have no image {location_of(asset_id)}; it was deleted, has expired, or was never "
            "uploaded. Upload it with upload_asset."
        )
    return row


def check_pointers(store: Store, owner: str, prompt: ModelInput) -> None:
    """Reject a prompt that points to an image that is not stored here, or has another format than the prompt says."""
    for position, chunk in enumerate(prompt.chunks):
        if isinstance(chunk, ImageAssetPointerChunk):
            if not chunk.location.startswith(SCHEME):
                raise InvalidInput(
                    f"prompt.chunks[{position}] points to {chunk.location!r}; only images uploaded to this server are "
                    f"supported ({SCHEME}…), see upload_asset."
                )
            found = find_asset(store, owner, chunk.location.removeprefix(SCHEME))
            if found.format != chunk.format:
                raise InvalidInput(
                    f"prompt.chunks[{position}] says that {chunk.location} is {chunk.format}, but it is {found.format}."
                )


def _write_error(error: OSError) -> StorageUnavailable:
    return StorageUnavailable(f"the server cannot write the upload ({error.strerror}); try again later.")
