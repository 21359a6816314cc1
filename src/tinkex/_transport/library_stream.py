"""A reply over TLS, HTTP/2 or a proxy, read while it arrives."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from urllib.parse import urlencode

import pyqwest

from tinkex._transport.base import Request, Upload
from tinkex.errors import APIConnectionError, APITimeoutError, HttpRequest, UploadError

__all__ = ["LibraryStream"]


class LibraryStream:
    """A reply of the HTTP library; closing it ends the request on the server too."""

    def __init__(self, about: HttpRequest, timeout: float) -> None:
        self._about, self._timeout = about, timeout
        self._held = contextlib.AsyncExitStack()
        self.status = 0
        self.headers: dict[str, str] = {}
        self._pieces: AsyncIterator[bytes | memoryview | bytearray] | None = None

    @classmethod
    async def open(cls, client: pyqwest.Client, base_url: str, request: Request) -> LibraryStream:
        """Sends the request and returns when the reply begins."""
        stream = cls(request.about(base_url), request.timeout)
        query = f"?{urlencode(request.query)}" if request.query else ""
        sending = _Sending(request.upload, request.timeout) if request.upload is not None else None
        try:
            async with stream._patience() as limit:
                if sending is not None:
                    sending.limit = limit
                    stream._held.callback(sending.close)
                reply = await stream._held.enter_async_context(
                    client.stream(
                        request.method,
                        stream._about.url + query,
                        {**request.headers, **_size_of(request)},
                        sending.pieces() if sending is not None else request.body or None,
                    )
                )
        except APIConnectionError:
            await stream.close()
            if sending is not None and sending.failure is not None:
                raise sending.failure from None
            raise
        except BaseException:
            await stream.close()
            raise
        stream.status = reply.status
        stream.headers = {name.lower(): value for name, value in reply.headers.items()}
        stream._pieces = aiter(reply.content)
        return stream

    async def read(self) -> bytes:
        """The next piece of the body."""
        if self._pieces is None:
            return b""
        async with self._patience():
            async for piece in self._pieces:
                if piece:
                    return bytes(piece)
        return b""

    async def close(self) -> None:
        """Ends the request."""
        self._pieces = None
        with contextlib.suppress(OSError, pyqwest.ReadError, pyqwest.StreamError):
            await self._held.aclose()

    @contextlib.asynccontextmanager
    async def _patience(self) -> AsyncIterator[asyncio.Timeout]:
        try:
            async with asyncio.timeout(self._timeout) as limit:
                yield limit
        except TimeoutError as error:
            raise APITimeoutError(
                self._about, f"{self._about.url} sent nothing for {self._timeout:g} s"
            ) from error
        except (
            ConnectionError,
            pyqwest.RemoteProtocolError,
            pyqwest.ReadError,
            pyqwest.WriteError,
            pyqwest.StreamError,
        ) as error:
            raise APIConnectionError(
                self._about, f"no answer from {self._about.url}: {str(error).rpartition(': ')[2]}"
            ) from error


class _Sending:
    """A body that the library asks for piece by piece, whenever it can send more."""

    def __init__(self, upload: Upload, timeout: float) -> None:
        self._reading = upload.read()
        self._timeout = timeout
        self.limit: asyncio.Timeout | None = None
        self.failure: UploadError | None = None
        """Why a file could not be read; the library knows only that there was an error."""

    async def pieces(self) -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        try:
            async for piece in self._reading:
                if self.limit is not None:
                    self.limit.reschedule(loop.time() + self._timeout)
                yield piece
        except UploadError as error:
            self.failure = error
            raise

    def close(self) -> None:
        self.limit = None
        self._reading.close()


def _size_of(request: Request) -> dict[str, str]:
    length = None if request.upload is None else request.upload.length
    return {} if length is None else {"content-length": str(length)}
