"""The server's HTTP protocol: limits on requests, so that unauthenticated clients cannot hold memory or connections.

The head of a request has a size limit and a timeout. Its body has a stall timeout: the application enforces it while the
request is handled, because the body may be waiting for the application (backpressure); afterwards this protocol does.
A connection without a request in flight, or whose client does not read the response, is idle and may be closed to make
room for others. A client that does not read for the stall timeout is disconnected: what it was sent takes memory.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tinkex.cli.server_connections import AcceptedConnection

MAX_HEAD_BYTES = 256 * 1024
"""Bytes of a request's URL and headers; with more than that plus one read, the connection is closed."""

MAX_COALESCED_BYTES = 64 * 1024

MIN_BYTES_PER_S = 8 * 1024
"""The rate at which a client must read a response, on average over the stall timeout."""


def _error_response(status: bytes, detail: bytes) -> bytes:
    body = b'{"detail":"%s"}' % detail
    return (
        b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s"
        % (status, len(body), body)
    )


_HEAD_TOO_LARGE = _error_response(
    b"431 Request Header Fields Too Large",
    b"the headers of this request are too large; send fewer or shorter ones.",
)
_HEAD_TIMEOUT = _error_response(
    b"408 Request Timeout", b"the headers of this request did not arrive in time; send it again."
)


class CoalescingTransport:
    """A transport that sends what is written in one iteration of the event loop together: a response's head and body.

    Everything but ``write``, ``close`` and ``get_write_buffer_size`` is that of the other transport.
    """

    def __init__(self, transport: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._waiting: list[bytes] = []
        self._num_waiting = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Send data soon; large data immediately, so that backpressure applies."""
        if not self._waiting:
            self._loop.call_soon(self._flush)
        self._waiting.append(data)
        self._num_waiting += len(data)
        if self._num_waiting > MAX_COALESCED_BYTES:
            self._flush()

    def get_write_buffer_size(self) -> int:
        """Returns how much has not been sent."""
        return self._num_waiting + int(self._transport.get_write_buffer_size())

    def close(self) -> None:
        """Send what was written, and close the connection."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._waiting:
            waiting, self._waiting, self._num_waiting = self._waiting, [], 0
            if not self._transport.is_closing():
                self._transport.write(waiting[0] if len(waiting) == 1 else b"".join(waiting))


class BoundedHttpProtocol(HttpToolsProtocol):
    """Limits the size of a request's head and the time without progress."""

    stall_s = 60.0
    connection: AcceptedConnection | None = None
    """Counts this connection as busy, idle or ended."""

    _head_bytes = 0
    _in_head = True
    _expects_data = True
    _last_progress = 0.0
    """When the head began, or the last part of the body arrived."""
    _timer: asyncio.TimerHandle | None = None
    _unread_bytes = 0
    _unread_timer: asyncio.TimerHandle | None = None

    @classmethod
    def with_stall_timeout(cls, stall_s: float) -> type[BoundedHttpProtocol]:
        """Returns the protocol with another stall timeout.

        >>> BoundedHttpProtocol.with_stall_timeout(5.0).stall_s
        5.0
        """
        return type(cls.__name__, (cls,), {"stall_s": stall_s})

    def connection_made(self, transport: Any) -> None:
        """Starts the timer: a request is expected."""
        super().connection_made(cast("asyncio.Transport", CoalescingTransport(transport, self.loop)))
        self._expect_data()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the timers."""
        for timer in (self._timer, self._unread_timer):
            if timer is not None:
                timer.cancel()
        if self.connection is not None:
            self.connection.ended()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parses the data; closes the connection if the head is too large."""
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.transport.write(_HEAD_TOO_LARGE)
            self.transport.close()

    def on_message_begin(self) -> None:
        """Starts the head timeout."""
        super().on_message_begin()
        self._in_head = True
        self._expect_data()

    def on_headers_complete(self) -> None:
        """Starts the body's stall timeout."""
        self._head_bytes = 0
        self._in_head, self._last_progress = False, self.loop.time()
        if self.connection is not None:
            self.connection.busy()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Records progress of the body."""
        self._head_bytes = 0
        self._last_progress = self.loop.time()
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Suspends the timeouts until the next request; uvicorn's keep-alive timeout covers idle connections."""
        self._head_bytes = 0
        self._expects_data = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Marks the connection as idle, unless the next request has arrived already."""
        super().on_response_complete()
        self._report_idle()

    def pause_writing(self) -> None:
        """Marks the connection as idle while the client does not read the response, and starts its timeout."""
        super().pause_writing()
        if self.connection is not None:
            self.connection.idle()
        self._expect_reading()

    def resume_writing(self) -> None:
        """Marks the connection as busy again."""
        super().resume_writing()
        if self._unread_timer is not None:
            self._unread_timer.cancel()
        if self.connection is not None:
            self.connection.busy()
        self._report_idle()

    def _report_idle(self) -> None:
        if self.connection is not None and (self.cycle is None or self.cycle.response_complete):
            self.connection.idle()

    def _expect_reading(self) -> None:
        self._unread_bytes = self.transport.get_write_buffer_size()
        self._unread_timer = self.loop.call_later(self.stall_s, self._check_reading)

    def _check_reading(self) -> None:
        num_read = self._unread_bytes - self.transport.get_write_buffer_size()
        if num_read < MIN_BYTES_PER_S * self.stall_s:
            # Reset, or the system would keep what it has not sent.
            connection = self.transport.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.transport.abort()
        else:
            self._expect_reading()

    def _expect_data(self) -> None:
        self._expects_data, self._last_progress = True, self.loop.time()
        if self._timer is None:  # requests share one timer: most end long before it fires
            self._timer = self.loop.call_later(self.stall_s, self._check_stall)

    def _check_stall(self) -> None:
        self._timer = None
        if not self._expects_data or self.transport.is_closing():
            return
        remaining = self._last_progress + self.stall_s - self.loop.time()
        # While a request is handled, the application may be the one that does not read.
        idle = self.cycle is None or self.cycle.response_complete
        if remaining <= 0 and idle:
            if self._in_head and self._head_bytes:
                self.transport.write(_HEAD_TIMEOUT)
            self.transport.close()
        else:
            self._timer = self.loop.call_later(
                remaining if remaining > 0 else self.stall_s, self._check_stall
            )
