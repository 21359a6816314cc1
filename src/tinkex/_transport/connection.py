"""One HTTP/1.1 connection: requests go out one at a time, replies are put together as they arrive."""

from __future__ import annotations

import asyncio
import math
import zlib
from collections.abc import Callable
from typing import cast

from tinkex._transport.base import Reply

__all__ = ["Broken", "Connection", "Late", "accepted_encodings"]

LONGEST_HEAD = 64 * 1024
LARGEST_BODY = 4 * 1024**3
JOINED_BODY = 64 * 1024
"""Bodies up to this size go out together with their headers, in one packet where it fits."""


class Broken(ConnectionError):
    """The connection ended, or said something that is not HTTP, before a whole reply was there."""


class Late(Broken):
    """The deadline of a request passed."""


class Connection(asyncio.Protocol):
    """Carries one request at a time; ``on_free`` is told when it can carry the next, ``on_lost`` when never again."""

    __slots__ = (
        "_body",
        "_buffer",
        "_headers",
        "_left",
        "_method",
        "_on_free",
        "_on_lost",
        "_status",
        "_waiting",
        "alive",
        "deadline",
        "transport",
    )

    def __init__(self, on_free: Callable[[Connection], None], on_lost: Callable[[Connection], None]) -> None:
        self.alive = True
        self.deadline = math.inf
        self.transport: asyncio.Transport
        self._on_free = on_free
        self._on_lost = on_lost
        self._buffer = bytearray()
        self._waiting: asyncio.Future[Reply] | None = None
        self._method = ""
        self._clear()

    def _clear(self) -> None:
        self._status = 0
        self._headers: dict[str, str] = {}
        self._left: int | None = 0
        """Bytes of the body still to come; None: until the connection ends; -1: in chunks."""
        self._body = bytearray()

    # ---- for the pool ----

    @property
    def busy(self) -> bool:
        """Whether a reply is awaited."""
        return self._waiting is not None

    def exchange(self, method: str, head: bytes, body: bytes, deadline: float) -> asyncio.Future[Reply]:
        """Sends a request; the future is the reply, or ``Broken``."""
        assert self._waiting is None
        self.deadline = deadline
        self._method = method
        self._waiting = waiting = asyncio.get_running_loop().create_future()
        if len(body) <= JOINED_BODY:
            self.transport.write(head + body)
        else:
            self.transport.write(head)
            self.transport.write(body)
        return waiting

    def abandon(self, error: Exception | None = None) -> None:
        """Gives the connection up, with ``error`` for whoever waits for a reply."""
        self._fail(error or Broken("the connection was closed"))

    # ---- for asyncio ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection stands."""
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Some bytes of a reply."""
        if self._waiting is None:
            self._fail(Broken("the server spoke without being asked"))
            return
        self._buffer += data
        try:
            self._read()
        except ValueError as error:
            self._fail(Broken(f"the answer is not HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        """The server, or the network, ended the connection."""
        if self._waiting is not None and self._status and self._left is None and exc is None:
            self._body += self._buffer
            self._finish(keep=False)
            return
        if self._status:
            self._fail(Broken("the connection ended in the middle of the body"))
        else:
            self._fail(Broken(f"the connection was closed before an answer{f': {exc}' if exc else ''}"))

    # ---- the reply, piece by piece ----

    def _read(self) -> None:
        while not self._status:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                if len(self._buffer) > LONGEST_HEAD:
                    raise ValueError("the headers never end")
                if not b"HTTP/1.".startswith(self._buffer[:7]):
                    raise ValueError("it does not start like HTTP")
                return
            self._read_head(self._buffer[:end].decode("latin-1"))
            del self._buffer[: end + 4]
        if self._left == -1:
            self._read_chunks()
        elif self._left is not None and len(self._buffer) >= self._left:
            if len(self._buffer) > self._left:
                raise ValueError("more bytes than it announced")
            self._body = self._buffer
            self._finish(keep=True)

    def _read_head(self, head: str) -> None:
        first, *lines = head.split("\r\n")
        if not first.startswith("HTTP/1.") or not first[9:12].isdigit():
            raise ValueError("no status line")
        status = int(first[9:12])
        if status < 200:
            return  # an interim reply: the real one follows
        headers = self._headers
        for line in lines:
            name, colon, value = line.partition(":")
            if not colon:
                raise ValueError("a header without a colon")
            name = name.lower()
            headers[name] = f"{headers[name]}, {value.strip()}" if name in headers else value.strip()
        self._status = status
        if first.startswith("HTTP/1.0"):
            headers.setdefault("connection", "close")
        if self._method == "HEAD" or status in {204, 304}:
            self._left = 0
        elif "chunked" in headers.get("transfer-encoding", ""):
            self._left = -1
        elif (length := headers.get("content-length")) is not None:
            if not length.isdecimal() or int(length) > LARGEST_BODY:
                raise ValueError("it announces a body of an impossible size")
            self._left = int(length)
        else:
            self._left = None

    def _read_chunks(self) -> None:
        buffer = self._buffer
        while (end := buffer.find(b"\r\n")) >= 0:
            size = int(buffer[:end].partition(b";")[0], 16)
            if size == 0:
                if buffer[end + 2 : end + 4] == b"\r\n":
                    self._finish(keep=len(buffer) == end + 4)
                elif (stop := buffer.find(b"\r\n\r\n", end)) >= 0:
                    self._finish(keep=len(buffer) == stop + 4)
                return
            if not 0 <= size <= LARGEST_BODY - len(self._body):
                raise ValueError("a chunk of an impossible size")
            if len(buffer) < end + 2 + size + 2:
                return
            self._body += buffer[end + 2 : end + 2 + size]
            del buffer[: end + 2 + size + 2]

    def _finish(self, *, keep: bool) -> None:
        waiting, self._waiting = self._waiting, None
        self.deadline = math.inf
        status, headers, body = self._status, self._headers, bytes(self._body)
        self._buffer = bytearray()
        self._clear()
        if keep and headers.get("connection", "").lower() != "close":
            self._on_free(self)
        else:
            self._end()
        if waiting is None or waiting.done():
            return
        try:
            waiting.set_result(Reply(status, headers, _plain(body, headers.get("content-encoding"))))
        except (ValueError, zlib.error) as error:
            waiting.set_exception(Broken(f"the answer cannot be decompressed: {error}"))

    def _fail(self, error: Exception) -> None:
        waiting, self._waiting = self._waiting, None
        self._end()
        if waiting is not None and not waiting.done():
            waiting.set_exception(error)

    def _end(self) -> None:
        if self.alive:
            self.alive = False
            self.transport.abort()
            self._on_lost(self)


def _plain(body: bytes, encoding: str | None) -> bytes:
    """The body as it was before it was compressed for the way."""
    if encoding is None or not body or encoding == "identity":
        return body
    if encoding in {"gzip", "x-gzip", "deflate"}:
        reader = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)
        plain = reader.decompress(body, LARGEST_BODY)
        if not reader.eof:
            raise ValueError("it ends too early")
        return plain
    if encoding == "zstd":
        try:
            import zstandard
        except ModuleNotFoundError:
            raise ValueError("the package zstandard is missing") from None

        try:
            return zstandard.ZstdDecompressor().decompressobj().decompress(body)
        except zstandard.ZstdError as error:
            raise ValueError(str(error)) from error
    raise ValueError(f"its encoding {encoding!r} was not asked for")


def accepted_encodings() -> str:
    """The compressions replies may come in, as the header says it."""
    from importlib.util import find_spec

    return "gzip, deflate, zstd" if find_spec("zstandard") else "gzip, deflate"
