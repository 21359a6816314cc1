"""Server-sent events: pieces of a byte stream in, named events out."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["EventParser", "ServerSentEvent"]

LONGEST_EVENT = 16 * 1024 * 1024
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""May stand before the first line, and means nothing there."""


@dataclass(frozen=True, slots=True)
class ServerSentEvent:
    """One event: its name (``message`` where it has none) and its data."""

    name: str
    data: bytes


class EventParser:
    r"""Puts events together however the stream was cut; raises ``ValueError`` for one that never ends.

    >>> parser = EventParser()
    >>> parser.feed(b"event: tok"), parser.feed(b"en\ndata: 1\n\n: comment\n")
    ([], [ServerSentEvent(name='token', data=b'1')])
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._begun = False
        self._name = ""
        self._data: list[bytes] = []
        self._size = 0

    def feed(self, piece: bytes) -> list[ServerSentEvent]:
        """The events that this piece completes."""
        ends_a_line = b"\n" in piece or b"\r" in piece or self._buffer.endswith(b"\r")
        self._buffer += piece
        if len(self._buffer) + self._size > LONGEST_EVENT:
            raise ValueError(f"an event is longer than {LONGEST_EVENT} bytes")
        if not ends_a_line:
            return []  # what is held is not gone through again for every piece
        # A return at the very end may be the first half of a line end.
        held = b"\r" if self._buffer.endswith(b"\r") else b""
        text = bytes(self._buffer[: len(self._buffer) - len(held)])
        *lines, rest = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._buffer = bytearray(rest + held)
        return [event for line in lines if (event := self._line(line)) is not None]

    def _line(self, line: bytes) -> ServerSentEvent | None:
        if not self._begun:
            self._begun = True
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
            self._size += len(value) + 1  # lines without anything in them count, too
        return None
