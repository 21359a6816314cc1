"""A directory as one tar file that is never written: its bytes are known in advance, and sent from any place on."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

BLOCK = 512
CHUNK = 1024 * 1024


@dataclass(frozen=True)
class Piece:
    """Some bytes of the archive: given, or the content of a file."""

    size: int
    content: bytes = b""
    file: Path | None = None


class Archive:
    """The tar of the plain files of one directory, flat and in order; the same files give the same bytes.

    >>> import io, tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     _ = (Path(directory) / "a.txt").write_text("hello")
    ...     archive = Archive(Path(directory))
    ...     content = b"".join(archive.read(0, archive.size))
    >>> len(content) == archive.size, tarfile.open(fileobj=io.BytesIO(content)).getnames()
    (True, ['a.txt'])
    """

    def __init__(self, directory: Path) -> None:
        self._pieces: list[Piece] = []
        for file in sorted(directory.iterdir()):
            if file.is_symlink() or not file.is_file():
                continue
            status = file.stat()
            member = tarfile.TarInfo(file.name)
            member.size, member.mtime, member.mode = status.st_size, int(status.st_mtime), 0o644
            self._add(member.tobuf(tarfile.GNU_FORMAT))
            self._pieces.append(Piece(status.st_size, file=file))
            self._add(b"\0" * (-status.st_size % BLOCK))
        self._add(b"\0" * 2 * BLOCK)
        self.size = sum(piece.size for piece in self._pieces)

    def _add(self, content: bytes) -> None:
        self._pieces.append(Piece(len(content), content))

    def read(self, start: int, stop: int) -> Iterator[bytes]:
        """The bytes from ``start`` up to ``stop``."""
        offset = 0
        for piece in self._pieces:
            first, last = max(start - offset, 0), min(stop - offset, piece.size)
            if first < last:
                if piece.file is None:
                    yield piece.content[first:last]
                else:
                    yield from _read(piece.file, first, last)
            offset += piece.size


def _read(file: Path, first: int, last: int) -> Iterator[bytes]:
    with file.open("rb") as content:
        content.seek(first)
        while first < last:
            chunk = content.read(min(CHUNK, last - first))
            if not chunk:
                raise EOFError(f"{file.name} is shorter than it was")
            first += len(chunk)
            yield chunk
