"""Where the bytes of an upload come from: memory, a file on disk, or a file object of the caller's.

Disks and file objects are read in threads of their own, a piece at a time, so that the size of a file does not matter and
one that never comes keeps nobody else waiting.
"""

from __future__ import annotations

import io
import stat
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import IO, Any, Protocol

from tinkex._runtime import run_in_daemon_thread
from tinkex.errors import UploadError

__all__ = ["PIECE", "BytesSource", "FileSource", "ObjectSource", "Readable", "Source"]

PIECE = 256 * 1024
"""What is read at once."""


class Readable(Protocol):
    """What a file object must be able to do; one that can ``seek`` and ``tell`` is rewound where that is needed."""

    def read(self, size: int, /) -> bytes | None:
        """At most so many bytes; none at the end."""
        ...


class Source(Protocol):
    """One file of an upload."""

    @property
    def size(self) -> int | None:
        """How many bytes there are, if that is known."""
        ...

    @property
    def repeatable(self) -> bool:
        """Whether the bytes can be read (again)."""
        ...

    def pieces(self) -> AsyncIterator[bytes]:
        """All bytes from the beginning."""
        ...

    def close(self) -> None:
        """Closes what :meth:`pieces` opened."""
        ...


class BytesSource:
    """Bytes in memory."""

    repeatable = True

    def __init__(self, content: bytes) -> None:
        self._content = content
        self.size = len(content)

    async def pieces(self) -> AsyncIterator[bytes]:
        """The bytes."""
        for start in range(0, self.size, PIECE):
            yield self._content[start : start + PIECE]

    def close(self) -> None:
        """Nothing is open."""


class FileSource:
    """A file on disk, opened when it is read."""

    repeatable = True

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            found = path.stat()
        except (OSError, ValueError) as error:
            raise UploadError(f"{path} cannot be read: {_why(error)}") from error
        if not stat.S_ISREG(found.st_mode):
            raise UploadError(f"{path} is no ordinary file; give the path of one, or open it and give that")
        self.size = found.st_size
        self._lock = threading.Lock()
        self._file: IO[bytes] | None = None

    async def pieces(self) -> AsyncIterator[bytes]:
        """As many bytes as the file had when the upload was prepared; fewer are an error."""
        file = self._file = await run_in_daemon_thread(self._open)
        left = self.size
        try:
            while left:
                piece = await run_in_daemon_thread(self._read, file, min(PIECE, left))
                if not piece:
                    raise UploadError(f"{self._path} became shorter while it was being sent; send it again")
                left -= len(piece)
                yield piece
        finally:
            self.close()

    def close(self) -> None:
        """Closes the file, as soon as no thread reads it."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _open(self) -> IO[bytes]:
        try:
            return self._path.open("rb", buffering=0)
        except OSError as error:
            raise UploadError(f"{self._path} cannot be read: {_why(error)}") from error

    def _read(self, file: IO[bytes], size: int) -> bytes:
        try:
            with self._lock:
                if file.closed:
                    raise UploadError(f"the upload of {self._path} was ended")
                return file.read(size)
        except OSError as error:
            raise UploadError(f"{self._path} cannot be read: {_why(error)}") from error


class ObjectSource:
    """A file object of the caller's, read from where it stands; it is rewound if it can be, and never closed."""

    def __init__(self, file: Any, name: str) -> None:
        if isinstance(file, io.TextIOBase):
            raise UploadError(f"{name} is opened for text; open it with 'rb'")
        self._file, self._name = file, name
        self._begun = False
        self._start: int | None = None
        self.size: int | None = None
        try:
            if file.seekable():
                self._start = file.tell()
                self.size = max(0, file.seek(0, io.SEEK_END) - self._start)
                file.seek(self._start)
        except AttributeError:
            pass  # something that only reads
        except (OSError, ValueError) as error:
            raise UploadError(f"{name} cannot be read: {_why(error)}") from error

    @property
    def repeatable(self) -> bool:
        """Whether it can be rewound, or was not read yet."""
        return self._start is not None or not self._begun

    async def pieces(self) -> AsyncIterator[bytes]:
        """The bytes from where the object stood."""
        if not self.repeatable:
            raise UploadError(
                f"{self._name} has been read already and cannot be rewound; give bytes, a path, or a new file object"
            )
        left = self.size
        first, self._begun = True, True
        while left is None or left:
            piece = await run_in_daemon_thread(self._read, PIECE if left is None else min(PIECE, left), first)
            first = False
            if not piece:
                if left:
                    raise UploadError(f"{self._name} ended {left} bytes before the end it had; send it again")
                return
            left = None if left is None else left - len(piece)
            yield piece

    def close(self) -> None:
        """It is the caller's to close."""

    def _read(self, size: int, first: bool) -> bytes:
        try:
            if first and self._start is not None:
                self._file.seek(self._start)
            piece = self._file.read(size)
        except (Exception, SystemExit) as error:
            # A file object may be anything: an archive that is cut short, a stream over a network.
            raise UploadError(f"{self._name} cannot be read: {_why(error)}") from error
        if not isinstance(piece, bytes | bytearray) or len(piece) > size:
            raise UploadError(
                f"{self._name} gave {type(piece).__name__} where at most {size} bytes were asked for; open it with 'rb'"
            )
        return bytes(piece)


def _why(error: BaseException) -> str:
    """What went wrong, in words.

    >>> _why(FileNotFoundError(2, "No such file or directory")), _why(KeyError("a"))
    ('No such file or directory', "KeyError: 'a'")
    """
    if isinstance(error, OSError | ValueError) and (said := getattr(error, "strerror", None) or str(error)):
        return str(said)
    return f"{type(error).__name__}: {error}"
