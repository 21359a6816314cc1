"""HTTP as the server speaks it: requests have bounds, so that nobody takes memory or places before they say who they are.

The head of a request has a size and a time. Its body may stand still only so long: while the call is under way the
application looks after that, because it may itself be what the body waits for; afterwards the connection does.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

LONGEST_HEAD = 256 * 1024
"""Bytes of a request's address and headers; beyond them, and what is read at once, the connection is closed."""


def _refusal(status: bytes, detail: bytes) -> bytes:
    body = b'{"detail":"%s"}' % detail
    return (
        b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s"
        % (status, len(body), body)
    )


_TOO_LONG = _refusal(
    b"431 Request Header Fields Too Large", b"the headers of this call are too large; send less in them."
)
_TOO_LATE = _refusal(b"408 Request Timeout", b"the headers of this call did not come in time; send it again.")


class BoundedRequests(HttpToolsProtocol):
    """Counts what comes in since the last piece of a request that is understood, and how long nothing did."""

    stall_s = 60.0

    _head_bytes = 0
    _in_head = True
    _expects_more = True
    _since = 0.0
    """When the head began, or the last piece of the body came."""
    _watch: asyncio.TimerHandle | None = None

    @classmethod
    def within(cls, stall_s: float) -> type[BoundedRequests]:
        """The protocol with another bound on stalls.

        >>> BoundedRequests.within(5.0).stall_s
        5.0
        """
        return type(cls.__name__, (cls,), {"stall_s": stall_s})

    def connection_made(self, transport: Any) -> None:
        """Somebody is there, and is expected to say something."""
        super().connection_made(transport)
        self._expect_more()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nobody is there any more."""
        if self._watch is not None:
            self._watch.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read on, unless the head has become too long."""
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > LONGEST_HEAD and not self.transport.is_closing():
            self.transport.write(_TOO_LONG)
            self.transport.close()

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        self._in_head = True
        self._expect_more()

    def on_headers_complete(self) -> None:
        """The head is over."""
        self._head_bytes = 0
        self._in_head, self._since = False, self.loop.time()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """What follows is no head."""
        self._head_bytes = 0
        self._since = self.loop.time()
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The next head begins when it wants to; how long a connection may lie idle is another matter."""
        self._head_bytes = 0
        self._expects_more = False
        super().on_message_complete()

    def _expect_more(self) -> None:
        self._expects_more, self._since = True, self.loop.time()
        if self._watch is None:  # one timer goes from request to request: most end long before it looks
            self._watch = self.loop.call_later(self.stall_s, self._look)

    def _look(self) -> None:
        self._watch = None
        if not self._expects_more or self.transport.is_closing():
            return
        left = self._since + self.stall_s - self.loop.time()
        idle = (
            self.cycle is None or self.cycle.response_complete
        )  # else what comes may be held back by the call itself
        if left <= 0 and idle:
            if self._in_head and self._head_bytes:
                self.transport.write(_TOO_LATE)
            self.transport.close()
        else:
            self._watch = self.loop.call_later(left if left > 0 else self.stall_s, self._look)
