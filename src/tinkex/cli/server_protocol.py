"""The server's HTTP protocol: limits on requests, so that unauthenticated clients cannot hold memory or connections.

The head of a request has a size limit and a timeout. Its body has a stall timeout: the application enforces it while the
request is handled, because the body may be waiting for the application (backpressure); afterwards this protocol does.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 256 * 1024
"""Bytes of a request's URL and headers; with more than that plus one read, the connection is closed."""


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


class BoundedHttpProtocol(HttpToolsProtocol):
    """Limits the size of a request's head and the time without progress."""

    stall_s = 60.0

    _head_bytes = 0
    _in_head = True
    _expects_data = True
    _last_progress = 0.0
    """When the head began, or the last part of the body arrived."""
    _timer: asyncio.TimerHandle | None = None

    @classmethod
    def with_stall_timeout(cls, stall_s: float) -> type[BoundedHttpProtocol]:
        """Returns the protocol with another stall timeout.

        >>> BoundedHttpProtocol.with_stall_timeout(5.0).stall_s
        5.0
        """
        return type(cls.__name__, (cls,), {"stall_s": stall_s})

    def connection_made(self, transport: Any) -> None:
        """Starts the timer: a request is expected."""
        super().connection_made(transport)
        self._expect_data()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the timer."""
        if self._timer is not None:
            self._timer.cancel()
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
