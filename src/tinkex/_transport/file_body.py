"""A file, or the rest of one, as the whole body of a request."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

from tinkex._transport.sources import FileSource

__all__ = ["FileBody"]


class FileBody:
    """A file from its byte ``start`` on, read while it is sent; ``on_read`` is called with the place that was reached.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     _ = file.write(b"0123456789")
    ...     file.flush()
    ...     FileBody(Path(file.name), start=4).length
    6
    """

    content_type = "application/octet-stream"
    repeatable = True

    def __init__(self, path: Path, start: int = 0, on_read: Callable[[int], None] | None = None) -> None:
        self._source = FileSource(path, start)
        self._start, self._on_read = start, on_read

    @property
    def length(self) -> int:
        """The number of bytes that are sent."""
        return self._source.size

    def read(self) -> FileBodyReader:
        """Starts reading."""
        return FileBodyReader(self._source, self._start, self._on_read)


class FileBodyReader:
    """One pass over the file."""

    def __init__(self, source: FileSource, start: int, on_read: Callable[[int], None] | None) -> None:
        self._source, self._place, self._on_read = source, start, on_read

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yields the file chunk by chunk."""
        async for chunk in self._source.chunks():
            self._place += len(chunk)
            yield chunk
            if self._on_read is not None:
                self._on_read(self._place)

    def close(self) -> None:
        """Stops reading and closes the file."""
        self._source.close()
