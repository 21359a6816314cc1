"""Images that users upload: written while they arrive, and kept all together or not at all."""

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
"""Images of one upload."""
MAX_NAME_LENGTH = 255
ID_DIGITS = 32

SIGNATURES = {"png": b"\x89PNG\r\n\x1a\n", "jpeg": b"\xff\xd8\xff"}
"""How the content of each format that prompts may hold begins."""
MEDIA_TYPES = {"png": {"image/png"}, "jpeg": {"image/jpeg", "image/jpg"}}
UNTYPED = frozenset({"", "application/octet-stream"})


def format_of(start: bytes) -> str | None:
    """The format of an image by its first bytes.

    >>> format_of(bytes([0xFF, 0xD8, 0xFF, 0xE0])), format_of(b"GIF89a")
    ('jpeg', None)
    """
    return next((name for name, signature in SIGNATURES.items() if start.startswith(signature)), None)


@dataclass
class _Arriving:
    """One image on its way."""

    name: str
    content_type: str
    temporary: Path
    file: IO[bytes]
    size: int = 0
    start: bytes = b""
    digest: hashlib._Hash = field(default_factory=hashlib.sha256)


class AssetUpload:
    """Takes in the files of one upload; nothing stays unless :meth:`keep` was reached. Safe to use from any thread."""

    def __init__(self, config: EngineConfig, store: Store, owner: str) -> None:
        self._config, self._store, self._owner = config, store, owner
        self._lock = threading.Lock()
        self._files: list[_Arriving] = []
        self._total = 0
        self._over = False

    def begin(self, name: str, content_type: str) -> None:
        """Start one more file."""
        with self._lock:
            self._check_open()
            if len(self._files) >= MAX_FILES:
                raise TooLarge(f"an upload holds at most {MAX_FILES} files; send the others in another one.")
            temporary = self._store.directories.new_asset_path()
            try:
                file = temporary.open("xb", buffering=0)
            except OSError as error:
                raise _unwritten(error) from error
            self._files.append(_Arriving(name[:MAX_NAME_LENGTH], content_type, temporary, file))

    def write(self, data: bytes) -> None:
        """Add to the file that was begun last."""
        with self._lock:
            self._check_open()
            arriving, largest = self._files[-1], self._config.max_asset_bytes
            if arriving.size + len(data) > largest:
                raise TooLarge(
                    f"{arriving.name!r} is larger than {largest} bytes, which is this server's limit for an image."
                )
            most = min(
                filter(None, (self._config.max_disk_bytes, self._config.max_disk_bytes_per_user)),
                default=None,
            )
            if most is not None and self._total + len(data) > most:
                raise NoRoom(f"this upload alone is more than the {most} bytes that may be kept; send less.")
            if len(arriving.start) < len(SIGNATURES["png"]):
                arriving.start += data[: len(SIGNATURES["png"])]
            arriving.digest.update(data)
            try:
                left = memoryview(data)
                while left:
                    left = left[arriving.file.write(left) :]
            except OSError as error:
                raise _unwritten(error) from error
            arriving.size += len(data)
            self._total += len(data)

    def end(self) -> None:
        """Finish the file that was begun last, if it is an image."""
        with self._lock:
            self._check_open()
            arriving = self._files[-1]
            arriving.file.close()
            found = format_of(arriving.start)
            if found is None:
                raise InvalidInput(
                    f"{arriving.name!r} is neither a PNG nor a JPEG image; prompts hold no other images."
                )
            said = arriving.content_type.partition(";")[0].strip().lower()
            if said not in UNTYPED and said not in MEDIA_TYPES[found]:
                raise InvalidInput(
                    f"{arriving.name!r} is said to be {said}, but its content is {found}; send it as image/{found}."
                )

    def keep(self, ttl_seconds: float | None) -> list[AssetRow]:
        """Keep all files; from here on they are assets of their owner."""
        now = time.time()
        with self._lock:
            self._check_open()
            if not self._files:
                raise InvalidInput("this upload holds no file; add one with a filename.")
            kept: list[AssetRow] = []
            replaced: list[str | None] = []
            try:
                for arriving in self._files:
                    digest = arriving.digest.hexdigest()
                    kept.append(
                        AssetRow(
                            owner=self._owner,
                            asset_id=digest[:ID_DIGITS],
                            name=arriving.name,
                            format=format_of(arriving.start) or "",
                            size_bytes=arriving.size,
                            sha256=digest,
                            file=self._store.directories.commit_asset(arriving.temporary),
                            created_at=now,
                            expires_at=now + (ttl_seconds or self._config.asset_retention_s),
                        )
                    )
                with self._store.database.transaction():
                    # With everybody else waiting. An upload that is repeated takes the place of the first.
                    new = {row.asset_id: row.size_bytes for row in kept}
                    old = [self._store.assets.get(self._owner, asset_id, now) for asset_id in new]
                    more = sum(new.values()) - sum(row.size_bytes for row in old if row is not None)
                    check_new_bytes(self._config, self._store, self._owner, more)
                    replaced = [self._store.assets.put(row) for row in kept]
            except BaseException as error:
                for row in kept:
                    self._store.directories.remove_asset(row.file)
                if isinstance(error, OSError):
                    raise _unwritten(error) from error
                raise
            self._over = True
        for file in filter(None, replaced):
            self._store.directories.remove_asset(file)
        return kept

    def discard(self) -> None:
        """Delete what arrived, unless it was kept."""
        with self._lock:
            if not self._over:
                self._over = True
                for arriving in self._files:
                    arriving.file.close()
                    arriving.temporary.unlink(missing_ok=True)

    def _check_open(self) -> None:
        if self._over:
            raise InvalidInput("this upload is over.")


def location_of(asset_id: str) -> str:
    """What an image chunk points to an asset with.

    >>> location_of("0a1b")
    'asset://0a1b'
    """
    return f"{SCHEME}{asset_id}"


def find_asset(store: Store, owner: str, asset_id: str) -> AssetRow:
    """A user's live asset; :class:`UnknownObject` for those of others as well."""
    row = store.assets.get(owner, asset_id, time.time())
    if row is None:
        raise UnknownObject(
            f"there is no image {location_of(asset_id)} of yours; it was deleted, its time is over, or it was never "
            "uploaded. Upload it with upload_asset."
        )
    return row


def check_pointers(store: Store, owner: str, prompt: ModelInput) -> None:
    """Refuse a prompt that points to an image which does not lie here, or is not what the prompt says."""
    for position, chunk in enumerate(prompt.chunks):
        if isinstance(chunk, ImageAssetPointerChunk):
            if not chunk.location.startswith(SCHEME):
                raise InvalidInput(
                    f"prompt.chunks[{position}] points to {chunk.location!r}; this server knows only images that were "
                    f"uploaded to it ({SCHEME}…), see upload_asset."
                )
            found = find_asset(store, owner, chunk.location.removeprefix(SCHEME))
            if found.format != chunk.format:
                raise InvalidInput(
                    f"prompt.chunks[{position}] says that {chunk.location} is {chunk.format}, but it is {found.format}."
                )


def _unwritten(error: OSError) -> StorageUnavailable:
    return StorageUnavailable(
        f"the disk of the server does not take the upload ({error.strerror}); try later."
    )
