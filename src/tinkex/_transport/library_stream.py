"""A reply over TLS, HTTP/2 or a proxy, read while it arrives."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from urllib.parse import urlencode

import pyqwest

from tinkex._transport.base import Request
from tinkex.errors import APIConnectionError, APITimeoutError, HttpRequest

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
        stream = cls(HttpRequest(request.method, base_url + request.path), request.timeout)
        query = f"?{urlencode(request.query)}" if request.query else ""
        try:
            async with stream._patience():
                reply = await stream._held.enter_async_context(
                    client.stream(
                        request.method, stream._about.url + query, request.headers, request.body or None
                    )
                )
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
    async def _patience(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._timeout):
                yield
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
