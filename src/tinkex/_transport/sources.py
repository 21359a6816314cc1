"""The content of a file to upload: bytes in memory, a file on disk, or a file object of the caller's.

Disks and file objects are read in threads of their own, a chunk at a time, so that the size of a file does not matter and
one that blocks delays nothing else.
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

__all__ = ["CHUNK_BYTES", "BytesSource", "FileSource", "ObjectSource", "Readable", "UploadSource"]

CHUNK_BYTES = 256 * 1024


class Readable(Protocol):
    """What a file object must offer; one that can ``seek`` and ``tell`` is rewound for another attempt."""

    def read(self, size: int, /) -> bytes | None:
        """Returns at most so many bytes, empty at the end."""
        ...


class UploadSource(Protocol):
    """The content of one file of an upload."""

    @property
    def size(self) -> int | None:
        """The size in bytes; None if it is unknown."""
        ...

    @property
    def repeatable(self) -> bool:
        """Whether the content can be read (again)."""
        ...

    def chunks(self) -> AsyncIterator[bytes]:
        """Yields the content from the beginning."""
        ...

    def close(self) -> None:
        """Closes what :meth:`chunks` opened."""
        ...


class BytesSource:
    """Bytes in memory."""

    repeatable = True

    def __init__(self, content: bytes) -> None:
        self._content = content
        self.size = len(content)

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yields the bytes."""
        for start in range(0, self.size, CHUNK_BYTES):
            yield self._content[start : start + CHUNK_BYTES]

    def close(self) -> None:
        """Does nothing: nothing is open."""


class FileSource:
    """A file on disk, from its byte ``start`` on; opened when the upload starts."""

    repeatable = True

    def __init__(self, path: Path, start: int = 0) -> None:
        self._path = path
        self._start = start
        try:
            found = path.stat()
        except (OSError, ValueError) as error:
            raise UploadError(f"{path} cannot be read: {_why(error)}") from error
        if not stat.S_ISREG(found.st_mode):
            raise UploadError(f"{path} is not a regular file; give the path of one, or an open file object")
        self.size = max(0, found.st_size - start)
        self._lock = threading.Lock()
        self._file: IO[bytes] | None = None

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yields as many bytes as the file had when the upload was prepared; raises ``UploadError`` if there are fewer."""
        file = self._file = await run_in_daemon_thread(self._open)
        remaining = self.size
        try:
            while remaining:
                chunk = await run_in_daemon_thread(self._read, file, min(CHUNK_BYTES, remaining))
                if not chunk:
                    raise UploadError(f"{self._path} was truncated during the upload; send it again")
                remaining -= len(chunk)
                yield chunk
        finally:
            self.close()

    def close(self) -> None:
        """Closes the file as soon as no thread reads it."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _open(self) -> IO[bytes]:
        try:
            file = self._path.open("rb", buffering=0)
            file.seek(self._start)
        except OSError as error:
            raise UploadError(f"{self._path} cannot be read: {_why(error)}") from error
        return file

    def _read(self, file: IO[bytes], size: int) -> bytes:
        try:
            with self._lock:
                if file.closed:
                    raise UploadError(f"the upload of {self._path} was cancelled")
                return file.read(size)
        except OSError as error:
            raise UploadError(f"{self._path} cannot be read: {_why(error)}") from error


class ObjectSource:
    """A file object of the caller's, read from its current position; it is rewound if possible, and never closed."""

    def __init__(self, file: Any, name: str) -> None:
        if isinstance(file, io.TextIOBase):
            raise UploadError(f"{name} is open in text mode; open it with 'rb'")
        self._file, self._name = file, name
        self._started = False
        self._start: int | None = None
        self.size: int | None = None
        try:
            if file.seekable():
                self._start = file.tell()
                self.size = max(0, file.seek(0, io.SEEK_END) - self._start)
                file.seek(self._start)
        except AttributeError:
            pass  # it can only be read
        except (OSError, ValueError) as error:
            raise UploadError(f"{name} cannot be read: {_why(error)}") from error

    @property
    def repeatable(self) -> bool:
        """Whether it can be rewound, or has not been read yet."""
        return self._start is not None or not self._started

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yields the bytes from the object's position when the upload was prepared."""
        if not self.repeatable:
            raise UploadError(
                f"{self._name} was already read and cannot be rewound; give bytes, a path, or a new file object"
            )
        remaining = self.size
        first, self._started = True, True
        while remaining is None or remaining:
            size = CHUNK_BYTES if remaining is None else min(CHUNK_BYTES, remaining)
            chunk = await run_in_daemon_thread(self._read, size, first)
            first = False
            if not chunk:
                if remaining:
                    raise UploadError(
                        f"{self._name} ended {remaining} bytes before its expected end; send it again"
                    )
                return
            remaining = None if remaining is None else remaining - len(chunk)
            yield chunk

    def close(self) -> None:
        """Does nothing: the caller closes it."""

    def _read(self, size: int, first: bool) -> bytes:
        try:
            if first and self._start is not None:
                self._file.seek(self._start)
            chunk = self._file.read(size)
        except (Exception, SystemExit) as error:
            # A file object may raise anything: a truncated archive, a stream over a network.
            raise UploadError(f"{self._name} cannot be read: {_why(error)}") from error
        if not isinstance(chunk, bytes | bytearray) or len(chunk) > size:
            raise UploadError(
                f"{self._name} returned {type(chunk).__name__} where at most {size} bytes were requested; "
                "open it with 'rb'"
            )
        return bytes(chunk)


def _why(error: BaseException) -> str:
    """The cause of an error, as text.

    >>> _why(FileNotFoundError(2, "No such file or directory")), _why(KeyError("a"))
    ('No such file or directory', "KeyError: 'a'")
    """
    if isinstance(error, OSError | ValueError) and (cause := getattr(error, "strerror", None) or str(error)):
        return str(cause)
    return f"{type(error).__name__}: {error}"
