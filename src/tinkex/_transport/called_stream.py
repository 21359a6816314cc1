"""A streamed reply as its caller reads it: it ends with the client."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tinkex._transport.caller import Caller
    from tinkex._transport.streaming import Stream
    from tinkex._wire.endpoints import Endpoint

__all__ = ["CalledStream"]


class CalledStream:
    """A reply that is still arriving; used on the background loop only."""

    def __init__(self, caller: Caller, row: Endpoint) -> None:
        self._caller = caller
        self._row = row
        self._stream: Stream | None = None

    def carry(self, stream: Stream) -> None:
        """Takes over a stream whose reply has begun."""
        self._stream = stream
        self._caller.streams.add(self)

    @property
    def content_type(self) -> str:
        """What the server says that the body is; nothing where it says nothing."""
        return "" if self._stream is None else self._stream.headers.get("content-type", "")

    async def read(self) -> bytes:
        """The next piece, or nothing at the end; ``ClosedError`` once the client is closed."""
        async with self._caller.closable(self._row):
            return b"" if self._stream is None else await self._stream.read()

    async def close(self) -> None:
        """Ends the stream; closing twice does nothing."""
        stream, self._stream = self._stream, None
        self._caller.streams.discard(self)
        if stream is not None:
            await stream.close()
