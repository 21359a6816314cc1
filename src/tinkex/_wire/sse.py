"""An incremental parser of server-sent events."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["EventParser", "ServerSentEvent"]

MAX_EVENT_BYTES = 16 * 1024 * 1024
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""May precede the first line; it is ignored."""


@dataclass(frozen=True, slots=True)
class ServerSentEvent:
    """One event: its name (``message`` by default) and its data."""

    name: str
    data: bytes


class EventParser:
    r"""Parses events from a stream in arbitrary pieces; raises ``ValueError`` for an event that is too long.

    >>> parser = EventParser()
    >>> parser.feed(b"event: tok"), parser.feed(b"en\ndata: 1\n\n: comment\n")
    ([], [ServerSentEvent(name='token', data=b'1')])
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._started = False
        self._name = ""
        self._data: list[bytes] = []
        self._size = 0

    def feed(self, piece: bytes) -> list[ServerSentEvent]:
        """Returns the events that this piece completes."""
        ends_a_line = b"\n" in piece or b"\r" in piece or self._buffer.endswith(b"\r")
        self._buffer += piece
        if len(self._buffer) + self._size > MAX_EVENT_BYTES:
            raise ValueError(f"an event is longer than {MAX_EVENT_BYTES} bytes")
        if not ends_a_line:
            return []  # the buffer is not scanned again for every piece
        # A trailing CR may be the first half of a CRLF.
        pending = b"\r" if self._buffer.endswith(b"\r") else b""
        text = bytes(self._buffer[: len(self._buffer) - len(pending)])
        *lines, rest = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._buffer = bytearray(rest + pending)
        return [event for line in lines if (event := self._line(line)) is not None]

    def _line(self, line: bytes) -> ServerSentEvent | None:
        if not self._started:
            self._started = True
            line = line.removeprefix(BYTE_ORDER_MARK)
        if not line:
            name, data = self._name or "message", self._data
            self._name, self._data, self._size = "", [], 0
            return ServerSentEvent(name, b"\n".join(data)) if data else None
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"event":
            self._name = value.decode("utf-8", "replace")
        elif field == b"data":
            self._data.append(value)
            self._size += len(value) + 1  # empty lines count too
        return None
