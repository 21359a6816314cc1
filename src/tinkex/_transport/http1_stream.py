"""Streamed requests and responses over HTTP/1.1 without TLS: each has a connection of its own.

Closing the connection cancels the request on the server, and a slow reader delays no other request.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
import zlib
from collections.abc import AsyncIterator, Callable
from urllib.parse import urlsplit

from tinkex._runtime import before_stop
from tinkex._transport.base import BodyReader, Request, Upload
from tinkex._transport.http1 import (
    CHUNKED,
    parse_head,
    parse_size,
    read_decompressed,
    request_head,
    stream_decompressor,
)
from tinkex.errors import APIConnectionError, APITimeoutError, HttpRequest, UploadError

__all__ = ["Http1Stream"]

READ_BYTES = 256 * 1024


class Http1Stream:
    """A response over a connection of its own; ``on_close`` is called once, when that is closed."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        request: Request,
        about: HttpRequest,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self._reader, self._writer = reader, writer
        _open_streams.add(self)
        if not _registered:
            _registered.append(True)
            before_stop(_abort_all)
        self._method, self._timeout, self._about = request.method, request.timeout, about
        self._on_close = on_close
        self.loop = asyncio.get_running_loop()
        self.status = 0
        self.headers: dict[str, str] = {}
        self._chunked = False
        self._decompressor: zlib._Decompress | None = None
        self._remaining: int | None = 0
        """Bytes of the body, or of the current chunk, that have not arrived; None if the body ends with the connection."""

    @classmethod
    async def open(
        cls, base_url: str, request: Request, on_close: Callable[[], None] | None = None
    ) -> Http1Stream:
        """Connects, sends the request and reads the head of the response; ``on_close`` is not called if that fails."""
        parts = urlsplit(base_url)
        about = request.about(base_url)
        stream: Http1Stream | None = None
        try:
            async with _bounded_wait(about, request.timeout) as limit:
                connected = await asyncio.open_connection(parts.hostname, parts.port or 80, limit=READ_BYTES)
                stream = cls(*connected, request, about, on_close)
                head = request_head(request, parts.path, f"host: {parts.netloc}\r\n", _framing(request))
                stream._writer.write(head + request.body)
                await stream._writer.drain()
                if request.upload is None:
                    await stream._read_head()
                else:
                    await stream._upload(request.upload, limit)
        except BaseException:
            if stream is not None:
                stream._on_close = None
                await stream.close()
            raise
        return stream

    async def read(self) -> bytes:
        """Returns the next chunk of the body."""
        async with _bounded_wait(self._about, self._timeout):
            return await read_decompressed(self._decompressor, self._read_raw)

    async def close(self) -> None:
        """Closes the connection."""
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()
        self.abort()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    def abort(self) -> None:
        """Closes the connection without waiting until it is closed."""
        self._writer.transport.abort()

    async def _read_head(self) -> None:
        while self.status < 200:  # interim responses come before the real one
            head = await self._reader.readuntil(b"\r\n\r\n")
            self.status, self.headers, self._remaining = parse_head(head[:-4].decode("latin-1"), self._method)
        if self._remaining == CHUNKED:
            self._chunked, self._remaining = True, 0
        self._decompressor = stream_decompressor(self.headers.get("content-encoding", "").lower())

    async def _read_raw(self) -> bytes:
        if self._chunked and self._remaining == 0:
            line = await self._reader.readuntil(b"\r\n")
            self._remaining = parse_size(line.partition(b";")[0].strip(), 16)
            if self._remaining == 0:
                self._chunked = False
        if self._remaining == 0:
            return b""
        chunk = await self._reader.read(
            READ_BYTES if self._remaining is None else min(self._remaining, READ_BYTES)
        )
        if self._remaining is not None:
            if not chunk:
                raise EOFError
            self._remaining -= len(chunk)
            if self._chunked and self._remaining == 0:
                await self._reader.readexactly(2)
        return chunk

    async def _upload(self, upload: Upload, limit: asyncio.Timeout) -> None:
        """Sends a body until its end, or until the server replies: it may have read enough to reject it."""
        reader = upload.read()
        reply = asyncio.ensure_future(self._read_head())
        sending = asyncio.ensure_future(self._send_body(reader, limit, chunked=upload.length is None))
        try:
            await asyncio.wait({reply, sending}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done() and not isinstance(sending.exception(), OSError):
                sending.result()
            # A server that closed the connection may have replied why.
            await reply
        finally:
            for task in (reply, sending):
                task.cancel()
            await asyncio.wait({reply, sending})
            for task in (reply, sending):
                if not task.cancelled():
                    task.exception()  # retrieved, so that asyncio does not warn: it was raised above if it matters
            reader.close()

    async def _send_body(self, reader: BodyReader, limit: asyncio.Timeout, *, chunked: bool) -> None:
        loop = asyncio.get_running_loop()
        async for chunk in reader:
            if chunk:
                self._writer.write(b"%x\r\n%b\r\n" % (len(chunk), chunk) if chunked else chunk)
            await self._writer.drain()
            limit.reschedule(loop.time() + self._timeout)
        if chunked:
            self._writer.write(b"0\r\n\r\n")
            await self._writer.drain()


_open_streams: weakref.WeakSet[Http1Stream] = weakref.WeakSet()
_registered: list[bool] = []


def _abort_all() -> None:
    """Closes the streams of the loop that is about to stop: nobody can read or close them afterwards."""
    loop = asyncio.get_running_loop()
    for stream in list(_open_streams):
        if stream.loop is loop:
            stream.abort()


def _framing(request: Request) -> str:
    if request.upload is None:
        length = f"content-length: {len(request.body)}\r\n" if request.body or request.method != "GET" else ""
        return f"{length}connection: close\r\n"
    # Without "close" a server that replies early continues to read, so that a reset does not destroy its reply.
    length_known = request.upload.length
    return "transfer-encoding: chunked\r\n" if length_known is None else f"content-length: {length_known}\r\n"


@contextlib.asynccontextmanager
async def _bounded_wait(about: HttpRequest, timeout_s: float) -> AsyncIterator[asyncio.Timeout]:
    """Bounds a wait for the server, and raises what goes wrong in it as ``APIConnectionError``."""
    try:
        async with asyncio.timeout(timeout_s) as limit:
            yield limit
    except TimeoutError as error:
        raise APITimeoutError(about, f"{about.url} sent nothing for {timeout_s:g} s") from error
    except UploadError:
        raise
    except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
        cause = "connection refused" if isinstance(error, ConnectionRefusedError) else str(error)
        if isinstance(error, EOFError):
            cause = "the connection was closed in the middle of the reply"
        raise APIConnectionError(about, f"no reply from {about.url}: {cause}") from error
