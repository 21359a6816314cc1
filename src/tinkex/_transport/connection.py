"""One HTTP/1.1 connection that is reused: it sends a request at a time and reads whole replies."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import cast

from tinkex._transport.base import Reply
from tinkex._transport.http1 import (
    CHUNKED,
    MAX_BODY_BYTES,
    ReplyTooLarge,
    decompress,
    parse_head,
    parse_size,
)

__all__ = ["Connection", "ConnectionLost", "ConnectionRejected", "DeadlineExceeded"]

MAX_HEAD_BYTES = 64 * 1024
MAX_COALESCED_BODY_BYTES = 64 * 1024
"""Bodies up to this size go out together with their headers, in one packet where it fits."""


class ConnectionLost(ConnectionError):
    """The connection ended, or sent something that is not HTTP, before the reply was complete."""


class DeadlineExceeded(ConnectionLost):
    """The deadline of a request passed."""


class ConnectionRejected(ConnectionError):
    """A certificate was not trusted, or a proxy does not allow the connection: another attempt would end in the same way."""


class Connection(asyncio.Protocol):
    """Carries one request at a time; calls ``on_free`` when it is ready for the next, ``on_lost`` when it is closed."""

    __slots__ = (
        "_body",
        "_body_bytes",
        "_buffer",
        "_headers",
        "_method",
        "_on_free",
        "_on_lost",
        "_status",
        "_waiter",
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
        self._waiter: asyncio.Future[Reply] | None = None
        self._method = ""
        self._clear()

    def _clear(self) -> None:
        self._status = 0
        self._headers: dict[str, str] = {}
        self._body_bytes: int | None = 0
        self._body = bytearray()

    # ---- for the pool ----

    @property
    def busy(self) -> bool:
        """Whether a reply is pending."""
        return self._waiter is not None

    def exchange(self, method: str, head: bytes, body: bytes, deadline: float) -> asyncio.Future[Reply]:
        """Sends a request; the future is its reply, or fails with ``ConnectionLost``."""
        assert self._waiter is None
        self.deadline = deadline
        self._method = method
        self._waiter = waiter = asyncio.get_running_loop().create_future()
        if len(body) <= MAX_COALESCED_BODY_BYTES:
            self.transport.write(head + body)
        else:
            self.transport.write(head)
            self.transport.write(body)
        return waiter

    def abort(self, error: Exception | None = None) -> None:
        """Closes the connection; a pending reply fails with ``error``."""
        self._fail(error or ConnectionLost("the connection was closed"))

    # ---- for asyncio ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio when the connection is established."""
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Called by asyncio with bytes of a reply."""
        if self._waiter is None:
            self._fail(ConnectionLost("the server sent data without a request"))
            return
        self._buffer += data
        try:
            self._read()
        except ValueError as error:
            self._fail(ConnectionLost(f"the reply is not HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio when the server or the network closed the connection."""
        if self._waiter is not None and self._status and self._body_bytes is None and exc is None:
            tls = self.transport.get_extra_info("ssl_object")
            if tls is None or tls.ended:
                self._body += self._buffer
                self._finish(keep=False)
                return
        if self._status:
            self._fail(ConnectionLost("the connection was closed in the middle of the body"))
        else:
            cause = f": {exc}" if exc else ""
            self._fail(ConnectionLost(f"the connection was closed before the reply{cause}"))

    # ---- the reply ----

    def _read(self) -> None:
        while not self._status:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                if len(self._buffer) > MAX_HEAD_BYTES:
                    raise ValueError("its headers do not end")
                if not b"HTTP/1.".startswith(self._buffer[:7]):
                    raise ValueError("no status line")
                return
            head = parse_head(self._buffer[:end].decode("latin-1"), self._method)
            del self._buffer[: end + 4]
            if head.status >= 200:
                self._status, self._headers, self._body_bytes = head
                if (self._body_bytes or 0) > MAX_BODY_BYTES:
                    raise ValueError(f"its body is larger than {MAX_BODY_BYTES:,} bytes")
        if self._body_bytes == CHUNKED:
            self._read_chunks()
        elif self._body_bytes is not None and len(self._buffer) >= self._body_bytes:
            if len(self._buffer) > self._body_bytes:
                raise ValueError("its body is longer than its content-length")
            self._body = self._buffer
            self._finish(keep=True)
        elif len(self._buffer) > MAX_BODY_BYTES:
            raise ValueError(f"its body is larger than {MAX_BODY_BYTES:,} bytes")

    def _read_chunks(self) -> None:
        buffer = self._buffer
        while (end := buffer.find(b"\r\n")) >= 0:
            size = parse_size(bytes(buffer[:end]).partition(b";")[0].strip(), 16)
            if size == 0:
                if buffer[end + 2 : end + 4] == b"\r\n":
                    self._finish(keep=len(buffer) == end + 4)
                elif (stop := buffer.find(b"\r\n\r\n", end)) >= 0:
                    self._finish(keep=len(buffer) == stop + 4)
                elif len(buffer) > MAX_HEAD_BYTES:
                    raise ValueError("its trailers do not end")
                return
            if size > MAX_BODY_BYTES - len(self._body):
                raise ValueError(f"its body is larger than {MAX_BODY_BYTES:,} bytes")
            if len(buffer) < end + 2 + size + 2:
                return
            self._body += buffer[end + 2 : end + 2 + size]
            del buffer[: end + 2 + size + 2]
        if len(buffer) > MAX_HEAD_BYTES:
            raise ValueError("the size of a chunk does not end")

    def _finish(self, *, keep: bool) -> None:
        waiter, self._waiter = self._waiter, None
        self.deadline = math.inf
        status, headers, body = self._status, self._headers, bytes(self._body)
        self._buffer = bytearray()
        self._clear()
        if keep and headers.get("connection", "").lower() != "close":
            self._on_free(self)
        else:
            self._close()
        if waiter is None or waiter.done():
            return
        try:
            waiter.set_result(Reply(status, headers, decompress(body, headers.get("content-encoding"))))
        except ReplyTooLarge as error:
            error.status = status
            waiter.set_exception(error)
        except ValueError as error:
            waiter.set_exception(ConnectionLost(f"the reply cannot be decompressed: {error}"))

    def _fail(self, error: Exception) -> None:
        waiter, self._waiter = self._waiter, None
        self._close()
        if waiter is not None and not waiter.done():
            waiter.set_exception(error)

    def _close(self) -> None:
        if self.alive:
            self.alive = False
            self.transport.abort()
            self._on_lost(self)
