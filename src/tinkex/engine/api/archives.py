"""A directory as a tar archive that is computed while it is read: its size is known in advance, and any range can be read."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

BLOCK_BYTES = 512
CHUNK_BYTES = 1024 * 1024


@dataclass(frozen=True)
class ArchivePart:
    """Consecutive bytes of the archive: literal content, or that of a file."""

    size: int
    content: bytes = b""
    file: Path | None = None


class Archive:
    """The tar archive of the regular files of one directory, flat and sorted; equal files give equal bytes.

    >>> import io, tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     _ = (Path(directory) / "a.txt").write_text("hello")
    ...     archive = Archive(Path(directory))
    ...     content = b"".join(archive.read(0, archive.size))
    >>> len(content) == archive.size, tarfile.open(fileobj=io.BytesIO(content)).getnames()
    (True, ['a.txt'])
    """

    def __init__(self, directory: Path) -> None:
        self._parts: list[ArchivePart] = []
        for file in sorted(directory.iterdir()):
            if file.is_symlink() or not file.is_file():
                continue
            status = file.stat()
            member = tarfile.TarInfo(file.name)
            member.size, member.mtime, member.mode = status.st_size, int(status.st_mtime), 0o644
            self._add(member.tobuf(tarfile.GNU_FORMAT))
            self._parts.append(ArchivePart(status.st_size, file=file))
            self._add(b"\0" * (-status.st_size % BLOCK_BYTES))
        self._add(b"\0" * 2 * BLOCK_BYTES)
        self.size = sum(part.size for part in self._parts)

    def _add(self, content: bytes) -> None:
        self._parts.append(ArchivePart(len(content), content))

    def read(self, start: int, stop: int) -> Iterator[bytes]:
        """Yields the bytes from ``start`` up to ``stop``; raises ``EOFError`` if a file was truncated meanwhile."""
        offset = 0
        for part in self._parts:
            first, last = max(start - offset, 0), min(stop - offset, part.size)
            if first < last:
                if part.file is None:
                    yield part.content[first:last]
                else:
                    yield from _read(part.file, first, last)
            offset += part.size

    def write(self, target: Path) -> None:
        """Writes the whole archive to a file; blocks."""
        with target.open("wb") as file:
            file.writelines(self.read(0, self.size))


def _read(file: Path, first: int, last: int) -> Iterator[bytes]:
    with file.open("rb") as content:
        content.seek(first)
        while first < last:
            chunk = content.read(min(CHUNK_BYTES, last - first))
            if not chunk:
                raise EOFError(f"{file.name} was truncated")
            first += len(chunk)
            yield chunk
