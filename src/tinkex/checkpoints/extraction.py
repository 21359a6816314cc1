"""Extracts untrusted archives: only regular files and directories, only below the target, within limits."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import shutil
import tarfile
import zlib
from pathlib import Path, PurePosixPath
from typing import IO, Self, cast

from tinkex.errors import SetupError

__all__ = ["MAX_FILES", "MAX_UNPACKED_BYTES", "extract"]

MAX_UNPACKED_BYTES = 1 << 40
MAX_FILES = 10_000
MAX_NAME_BYTES = 1024
COPY_BYTES = 1 << 17
"""How much is read at a time; a header that announces a longer name or extension is rejected."""

_COMPRESSIONS = ((b"\x1f\x8b", gzip.open), (b"BZh", bz2.open), (b"\xfd7zXZ\x00", lzma.open))


def extract(
    archive: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    max_bytes: int = MAX_UNPACKED_BYTES,
    max_files: int = MAX_FILES,
) -> list[Path]:
    """Extracts the tar file ``archive`` (plain, gzip, bzip2 or xz) into ``directory``, which must not exist, and returns its files.

    Links, devices, absolute names and names outside of the directory are rejected before anything of them is written;
    modes and owners in the archive are ignored. More than ``max_bytes`` bytes or ``max_files`` files are rejected. After
    an error ``directory`` is removed.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     archive = Path(folder) / "adapter.tar"
    ...     _ = (Path(folder) / "adapter_config.json").write_text("{}")
    ...     with tarfile.open(archive, "w") as tar:
    ...         tar.add(Path(folder) / "adapter_config.json", "adapter_config.json")
    ...     [file.name for file in extract(archive, Path(folder) / "adapter")]
    ['adapter_config.json']
    """
    archive, directory = Path(archive), Path(directory)
    directory.mkdir(parents=True)
    try:
        return _extract(archive, directory, max_bytes, max_files)
    except (tarfile.TarError, EOFError, ValueError, RecursionError) as error:
        shutil.rmtree(directory, ignore_errors=True)
        raise SetupError(
            f"{archive.name} is not a complete tar archive ({error}); download it again"
        ) from error
    except OSError as error:
        shutil.rmtree(directory, ignore_errors=True)
        raise SetupError(
            f"{archive.name} cannot be extracted into {directory} ({error.strerror or error}); free some space there"
        ) from error
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise


def _extract(archive: Path, directory: Path, max_bytes: int, max_files: int) -> list[Path]:
    files: list[Path] = []
    seen: set[PurePosixPath] = set()
    remaining = min(max_bytes, shutil.disk_usage(directory).free)
    with _open(archive) as content, tarfile.open(fileobj=cast("IO[bytes]", content), mode="r:") as opened:
        for number, member in enumerate(opened):
            if number >= max_files:
                raise SetupError(f"{archive.name} has more than {max_files} entries; it was not extracted")
            path = _safe(archive, member)
            if path in seen:
                raise SetupError(f"{archive.name} has two entries {member.name!r}; it was not extracted")
            seen.add(path)
            target = directory.joinpath(*path.parts)
            if member.isdir():
                target.mkdir(parents=True, exist_ok=True)
                continue
            remaining -= member.size
            if remaining < 0:
                raise SetupError(
                    f"{archive.name} extracts to more than {max_bytes:,} bytes, or more than the disk has free; "
                    "it was not extracted"
                )
            target.parent.mkdir(parents=True, exist_ok=True)
            _write(opened, member, target)
            files.append(target)
    return files


class _BoundedReads:
    """A file that rejects reads of more than ``COPY_BYTES``: ``tarfile`` reads names and extensions in one call."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, size: int) -> bytes:
        if size > COPY_BYTES:
            raise tarfile.ReadError(f"a header has {size:,} bytes; at most {COPY_BYTES:,} are allowed")
        try:
            return self._file.read(size)
        except (OSError, zlib.error, lzma.LZMAError) as error:
            raise tarfile.ReadError(str(error)) from error

    def seek(self, position: int) -> int:
        return self._file.seek(position)

    def tell(self) -> int:
        return self._file.tell()


def _open(archive: Path) -> _BoundedReads:
    with archive.open("rb") as file:
        start = file.read(6)
    for magic, opener in _COMPRESSIONS:
        if start.startswith(magic):
            return _BoundedReads(cast("IO[bytes]", opener(archive)))
    return _BoundedReads(archive.open("rb"))


def _safe(archive: Path, member: tarfile.TarInfo) -> PurePosixPath:
    """The path of a member below the target; raises ``SetupError`` if it is outside, or not a file or directory."""
    if len(member.name) > MAX_NAME_BYTES:
        raise SetupError(
            f"{archive.name} has a name of {len(member.name):,} characters ({member.name[:80]!r}…); it was not extracted"
        )
    path = PurePosixPath(member.name)
    invalid = (
        "\\" in member.name or "\0" in member.name or ":" in path.parts[0]
        if path.parts
        else member.name not in {".", "./"}
    )
    if path.is_absolute() or ".." in path.parts or invalid:
        raise SetupError(
            f"{archive.name} has an entry {member.name!r} outside of its directory; it was not extracted"
        )
    if not (member.isreg() or member.isdir()) or member.issparse():
        raise SetupError(
            f"{archive.name} has an entry {member.name!r} that is neither a regular file nor a directory; "
            "it was not extracted"
        )
    return path


def _write(opened: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> None:
    content = opened.extractfile(member)
    assert content is not None, "it is a regular file"
    # Never through a link, and never over an existing file.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    with content, os.fdopen(os.open(target, flags, 0o644), "wb") as file:
        shutil.copyfileobj(content, file, COPY_BYTES)
        if file.tell() != member.size:
            raise EOFError(f"{member.name} is truncated")
