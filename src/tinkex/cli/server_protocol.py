"""HTTP as the server speaks it: the head of a request has a size, so that nobody fills the memory before they say who they are."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

LONGEST_HEAD = 256 * 1024
"""Bytes of a request's address and headers; beyond them, and what is read at once, the connection is closed."""

_DETAIL = b'{"detail":"the headers of this call are too large; send less in them."}'
_REFUSAL = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nContent-Type: application/json\r\n"
    b"Connection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(_DETAIL), _DETAIL)
)


class BoundedHeads(HttpToolsProtocol):
    """Counts what comes in since the last piece of a request that is understood."""

    _head_bytes = 0

    def data_received(self, data: bytes) -> None:
        """Read on, unless the head has become too long."""
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > LONGEST_HEAD and not self.transport.is_closing():
            self.transport.write(_REFUSAL)
            self.transport.close()

    def on_headers_complete(self) -> None:
        """The head is over."""
        self._head_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """What follows is no head."""
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The next head begins."""
        self._head_bytes = 0
        super().on_message_complete()
