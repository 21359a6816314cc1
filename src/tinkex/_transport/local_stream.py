"""A reply of the engine in this process, read while its application writes it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from tinkex._transport.base import Upload
from tinkex.errors import APIConnectionError, APITimeoutError, HttpRequest, UploadError

__all__ = ["LocalStream"]

Message = MutableMapping[str, Any]
App = Callable[
    [Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]
]

PIECES = 16
"""How far the application may be ahead of the reader."""


class LocalStream:
    """One call of an ASGI application; closing the stream ends the call."""

    def __init__(self, about: HttpRequest, timeout: float) -> None:
        self._about, self._timeout = about, timeout
        self.status = 0
        self.headers: dict[str, str] = {}
        self._pieces: deque[bytes] = deque()
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        self._over = False
        self._call: asyncio.Task[None] | None = None
        self._limit: asyncio.Timeout | None = None
        self._unreadable: UploadError | None = None

    @classmethod
    async def open(
        cls, app: App, scope: dict[str, Any], body: bytes | Upload, about: HttpRequest, timeout: float
    ) -> LocalStream:
        """Starts the call and returns when the reply begins."""
        stream = cls(about, timeout)
        call = stream._run(app, scope, body) if isinstance(body, bytes) else stream._upload(app, scope, body)
        stream._call = asyncio.create_task(call)
        try:
            await stream._wait(lambda: stream.status > 0)
            if stream._unreadable is not None:
                raise stream._unreadable
            if not stream.status:
                raise APIConnectionError(about, f"the engine ended {about.url} without an answer")
        except BaseException:
            await stream.close()
            raise
        return stream

    async def read(self) -> bytes:
        """The next piece of the body."""
        await self._wait(lambda: bool(self._pieces))
        if not self._pieces:
            return b""
        self._room.set()
        return self._pieces.popleft()

    async def close(self) -> None:
        """Ends the call."""
        if self._call is not None:
            self._call.cancel()
            await asyncio.wait({self._call})

    async def _wait(self, arrived: Callable[[], bool]) -> None:
        try:
            async with asyncio.timeout(self._timeout) as self._limit:
                while not arrived() and not self._over:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError as error:
            raise APITimeoutError(
                self._about, f"the engine said nothing to {self._about.url} for {self._timeout:g} s"
            ) from error
        finally:
            self._limit = None

    async def _run(self, app: App, scope: dict[str, Any], body: bytes) -> None:
        asked: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if not asked:
                # A reader that goes away cancels the call itself, so there is no disconnect to wait for.
                await asyncio.get_running_loop().create_future()
            return asked.pop()

        await self._answer(app, scope, receive)

    async def _upload(self, app: App, scope: dict[str, Any], upload: Upload) -> None:
        """The call with a body that is read as the application asks for it."""
        try:
            reading = upload.read()
        except UploadError as error:
            self._unreadable = error
            self._over = True
            self._changed.set()
            return
        pieces = aiter(reading)

        async def receive() -> Message:
            try:
                piece = await anext(pieces, b"")
            except UploadError as error:
                self._unreadable = error
                return {"type": "http.disconnect"}  # what the application sees of a caller that breaks off
            if self._limit is not None:
                self._limit.reschedule(asyncio.get_running_loop().time() + self._timeout)
            return {"type": "http.request", "body": piece, "more_body": bool(piece)}

        try:
            await self._answer(app, scope, receive)
        finally:
            reading.close()

    async def _answer(
        self, app: App, scope: dict[str, Any], receive: Callable[[], Awaitable[Message]]
    ) -> None:
        try:
            await app(scope, receive, self._send)
        finally:
            self._over = True
            self._changed.set()

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.headers = {
                name.decode("latin-1").lower(): value.decode("latin-1") for name, value in message["headers"]
            }
            self.status = message["status"]
        elif message.get("body"):
            while len(self._pieces) >= PIECES:
                self._room.clear()
                await self._room.wait()
            self._pieces.append(message["body"])
        self._changed.set()
