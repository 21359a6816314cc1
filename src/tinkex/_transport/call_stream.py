"""The streamed response of a call; it ends with the client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tinkex._transport.caller import Caller
    from tinkex._transport.streaming import ResponseStream
    from tinkex._wire.endpoints import Endpoint

__all__ = ["CallStream"]


class CallStream:
    """A response whose body is still arriving; used on the background loop only."""

    def __init__(self, caller: Caller, endpoint: Endpoint, stream: ResponseStream) -> None:
        self._caller = caller
        self._endpoint = endpoint
        self._stream: ResponseStream | None = stream
        self.status: int = stream.status
        self.headers: Mapping[str, str] = stream.headers
        caller.streams.add(self)

    @property
    def content_type(self) -> str:
        """The content type of the body; empty if the server does not say it."""
        return self.headers.get("content-type", "")

    async def read(self) -> bytes:
        """Returns the next chunk, empty at the end; raises ``ClosedError`` once the client is closed."""
        async with self._caller.closable(self._endpoint):
            return b"" if self._stream is None else await self._stream.read()

    async def close(self) -> None:
        """Ends the stream; closing twice does nothing."""
        stream, self._stream = self._stream, None
        self._caller.streams.discard(self)
        if stream is not None:
            await stream.close()
