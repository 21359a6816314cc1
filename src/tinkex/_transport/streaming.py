"""Replies that are read while they arrive: what every transport that can stream offers, and plain HTTP's way.

A stream has a connection of its own: closing it is how the server learns that nobody reads any more, and a
reader that is slow slows down nobody else.
"""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Protocol, runtime_checkable
from urllib.parse import urlencode, urlsplit

from tinkex._transport.base import Reading, Reply, Request, Transport, Upload
from tinkex.errors import APIConnectionError, APITimeoutError, HttpRequest, UploadError

__all__ = ["PlainStream", "Stream", "Streaming", "open_stream", "send_upload"]

PIECE = 64 * 1024
LARGEST_ANSWER = 64 * 1024 * 1024
"""To an upload: a few words about what arrived."""


class Stream(Protocol):
    """A reply whose body is still to come."""

    @property
    def status(self) -> int:
        """The status."""
        ...

    @property
    def headers(self) -> Mapping[str, str]:
        """Header names are in lower case."""
        ...

    async def read(self) -> bytes:
        """The next piece, or nothing at the end; ``APIConnectionError`` when it breaks off or stalls."""
        ...

    async def close(self) -> None:
        """Ends the stream wherever it is."""
        ...


@runtime_checkable
class Streaming(Protocol):
    """A transport that can hand out a reply while it arrives."""

    async def stream(self, request: Request) -> Stream:
        """Sends a request and returns as soon as the reply begins; ``timeout`` bounds each wait for more."""
        ...


async def open_stream(transport: Transport, request: Request) -> Stream:
    """The reply as a stream; a transport that cannot stream delivers it in one piece."""
    if isinstance(transport, Streaming):
        return await transport.stream(request)
    if request.upload is not None:
        request = replace(request, body=await _whole_body(request.upload), upload=None)
    return _Whole(await transport.send(request))


async def send_upload(transport: Transport, request: Request) -> Reply:
    """Sends files and returns the whole reply; a reply that comes early ends the sending."""
    stream = await open_stream(transport, request)
    try:
        body = bytearray()
        try:
            while piece := await stream.read():
                body += piece
                if len(body) > LARGEST_ANSWER:
                    raise APIConnectionError(request.about(""), f"the answer to {request.path} does not end")
        except APIConnectionError:
            # A server that refuses in the middle may hang up before its words are through; its status is.
            if stream.status < 400:
                raise
        return Reply(stream.status, stream.headers, bytes(body))
    finally:
        await stream.close()


async def _whole_body(upload: Upload) -> bytes:
    reading = upload.read()
    try:
        return b"".join([piece async for piece in reading])
    finally:
        reading.close()


class _Whole:
    """A reply that came as a whole."""

    def __init__(self, reply: Reply) -> None:
        self.status, self.headers, self._body = reply.status, reply.headers, reply.body

    async def read(self) -> bytes:
        body, self._body = self._body, b""
        return body

    async def close(self) -> None:
        self._body = b""


class PlainStream:
    """A reply over a connection of its own, without TLS and without a proxy."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        about: HttpRequest,
        timeout: float,
    ) -> None:
        self._reader, self._writer = reader, writer
        self._about, self._timeout = about, timeout
        self.status = 0
        self.headers: dict[str, str] = {}
        self._chunked = False
        self._decoder: zlib._Decompress | None = None
        self._left: int | None = 0
        """Bytes of the body, or of the chunk, still to come; None: until the connection ends."""

    @classmethod
    async def open(cls, base_url: str, request: Request) -> PlainStream:
        """Connects, sends the request and reads the head of the reply."""
        parts = urlsplit(base_url)
        about = request.about(base_url)
        stream: PlainStream | None = None
        try:
            async with _patience(about, request.timeout) as limit:
                connected = await asyncio.open_connection(parts.hostname, parts.port or 80, limit=PIECE)
                stream = cls(*connected, about, request.timeout)
                stream._writer.write(_head(request, parts.netloc, parts.path) + request.body)
                await stream._writer.drain()
                if request.upload is None:
                    await stream._reply_begins()
                else:
                    await stream._send_while_listening(request.upload, limit)
        except BaseException:
            if stream is not None:
                await stream.close()
            raise
        return stream

    async def _reply_begins(self) -> None:
        while self.status < 200:  # interim replies come before the real one
            self._read_head((await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1"))

    async def _send_while_listening(self, upload: Upload, limit: asyncio.Timeout) -> None:
        """Sends a body until it is over, or the server answers: it may have read enough to refuse it."""
        reading = upload.read()
        answer = asyncio.ensure_future(self._reply_begins())
        sending = asyncio.ensure_future(self._send_pieces(reading, limit, chunked=upload.length is None))
        try:
            await asyncio.wait({answer, sending}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done() and not isinstance(sending.exception(), OSError):
                sending.result()
            # A server that ended the connection may have said why.
            await answer
        finally:
            for task in (answer, sending):
                task.cancel()
            await asyncio.wait({answer, sending})
            for task in (answer, sending):
                if not task.cancelled():
                    task.exception()  # what matters of it was raised above
            reading.close()

    async def _send_pieces(self, reading: Reading, limit: asyncio.Timeout, *, chunked: bool) -> None:
        loop = asyncio.get_running_loop()
        async for piece in reading:
            if piece:
                self._writer.write(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
            await self._writer.drain()
            limit.reschedule(loop.time() + self._timeout)
        if chunked:
            self._writer.write(b"0\r\n\r\n")
            await self._writer.drain()

    async def read(self) -> bytes:
        """The next piece of the body."""
        async with _patience(self._about, self._timeout):
            if self._decoder is None:
                return await self._read_raw()
            while packed := await self._read_raw():
                try:
                    if piece := self._decoder.decompress(packed):
                        return piece
                except zlib.error as error:
                    raise ValueError(f"the answer cannot be decompressed: {error}") from error
            if not self._decoder.eof:
                raise EOFError
            return b""

    async def _read_raw(self) -> bytes:
        if self._chunked and self._left == 0:
            size = _size((await self._reader.readuntil(b"\r\n")).partition(b";")[0].strip(), 16)
            if size == 0:
                self._chunked = False
                return b""
            self._left = size
        if self._left == 0:
            return b""
        piece = await self._reader.read(PIECE if self._left is None else min(self._left, PIECE))
        if self._left is not None:
            if not piece:
                raise EOFError
            self._left -= len(piece)
            if self._chunked and self._left == 0:
                await self._reader.readexactly(2)
        return piece

    async def close(self) -> None:
        """Ends the connection."""
        self._writer.transport.abort()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    def _read_head(self, head: str) -> None:
        first, *lines = head.rstrip("\r\n").split("\r\n")
        if not first.startswith("HTTP/1.") or not first[9:12].isdigit():
            raise ValueError("it does not start like HTTP")
        self.status = int(first[9:12])
        fields = (line.partition(":") for line in lines)
        self.headers = {name.strip().lower(): value.strip() for name, _, value in fields}
        self._chunked = "chunked" in self.headers.get("transfer-encoding", "")
        length = self.headers.get("content-length")
        self._left = 0 if self._chunked else None if length is None else _size(length.encode(), 10)
        encoding = self.headers.get("content-encoding", "identity").lower()
        if encoding in {
            "gzip",
            "x-gzip",
            "deflate",
        }:  # not asked for, but things on the way may pack what they carry
            self._decoder = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)
        elif encoding not in {"", "identity"}:
            raise ValueError(f"its encoding {encoding!r} was not asked for")


def _size(digits: bytes, base: int) -> int:
    """A number of bytes; signs and spaces, which numbers of Python's may have, are none of HTTP's."""
    if not digits.isalnum():
        raise ValueError("a size that is no number")
    return int(digits, base)


@contextlib.asynccontextmanager
async def _patience(about: HttpRequest, seconds: float) -> AsyncIterator[asyncio.Timeout]:
    """Bounds a wait for the server, and names what went wrong in it."""
    try:
        async with asyncio.timeout(seconds) as limit:
            yield limit
    except TimeoutError as error:
        raise APITimeoutError(about, f"{about.url} sent nothing for {seconds:g} s") from error
    except UploadError:
        raise
    except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
        cause = "connection refused" if isinstance(error, ConnectionRefusedError) else str(error)
        if isinstance(error, EOFError):
            cause = "the connection ended in the middle of the answer"
        raise APIConnectionError(about, f"no answer from {about.url}: {cause}") from error


def _head(request: Request, host: str, prefix: str) -> bytes:
    query = f"?{urlencode(request.query)}" if request.query else ""
    lines = "".join([f"{name}: {value}\r\n" for name, value in request.headers.items()])
    if request.upload is None:
        more = f"content-length: {len(request.body)}\r\nconnection: close"
    else:
        # Not told to close, a server that answers early goes on reading, and its answer is not lost in a reset.
        length = request.upload.length
        more = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
    return (
        f"{request.method} {prefix}{request.path}{query} HTTP/1.1\r\nhost: {host}\r\n{lines}{more}\r\n\r\n"
    ).encode("latin-1")
