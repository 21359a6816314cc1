"""A response of the engine in this process, read while its application writes it."""

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

MAX_BUFFERED_CHUNKS = 16
"""How far the application may be ahead of the reader."""


class LocalStream:
    """One call of an ASGI application; closing the stream cancels the call."""

    def __init__(self, about: HttpRequest, timeout: float) -> None:
        self._about, self._timeout = about, timeout
        self.status = 0
        self.headers: dict[str, str] = {}
        self._chunks: deque[bytes] = deque()
        self._changed = asyncio.Event()
        self._space = asyncio.Event()
        self._finished = False
        self._call: asyncio.Task[None] | None = None
        self._limit: asyncio.Timeout | None = None
        self._upload_error: UploadError | None = None

    @classmethod
    async def open(
        cls, app: App, scope: dict[str, Any], body: bytes | Upload, about: HttpRequest, timeout: float
    ) -> LocalStream:
        """Starts the call and returns when the headers of the response are here."""
        stream = cls(about, timeout)
        call = stream._run(app, scope, body) if isinstance(body, bytes) else stream._upload(app, scope, body)
        stream._call = asyncio.create_task(call)
        try:
            await stream._wait(lambda: stream.status > 0)
            if stream._upload_error is not None:
                raise stream._upload_error
            if not stream.status:
                raise APIConnectionError(about, f"the engine ended {about.url} without a reply")
        except BaseException:
            await stream.close()
            raise
        return stream

    async def read(self) -> bytes:
        """Returns the next chunk of the body."""
        await self._wait(lambda: bool(self._chunks))
        if not self._chunks:
            return b""
        self._space.set()
        return self._chunks.popleft()

    async def close(self) -> None:
        """Cancels the call."""
        if self._call is not None:
            self._call.cancel()
            await asyncio.wait({self._call})

    async def _wait(self, condition: Callable[[], bool]) -> None:
        try:
            async with asyncio.timeout(self._timeout) as self._limit:
                while not condition() and not self._finished:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError as error:
            raise APITimeoutError(
                self._about, f"the engine sent nothing for {self._about.url} for {self._timeout:g} s"
            ) from error
        finally:
            self._limit = None

    async def _run(self, app: App, scope: dict[str, Any], body: bytes) -> None:
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if not messages:
                # A reader that disconnects cancels the call itself, so there is no disconnect message.
                await asyncio.get_running_loop().create_future()
            return messages.pop()

        await self._run_app(app, scope, receive)

    async def _upload(self, app: App, scope: dict[str, Any], upload: Upload) -> None:
        """The call with a body that is read as the application receives it."""
        try:
            reader = upload.read()
        except UploadError as error:
            self._upload_error = error
            self._finished = True
            self._changed.set()
            return
        chunks = aiter(reader)

        async def receive() -> Message:
            try:
                chunk = await anext(chunks, b"")
            except UploadError as error:
                self._upload_error = error
                return {"type": "http.disconnect"}
            if self._limit is not None:
                self._limit.reschedule(asyncio.get_running_loop().time() + self._timeout)
            return {"type": "http.request", "body": chunk, "more_body": bool(chunk)}

        try:
            await self._run_app(app, scope, receive)
        finally:
            reader.close()

    async def _run_app(
        self, app: App, scope: dict[str, Any], receive: Callable[[], Awaitable[Message]]
    ) -> None:
        try:
            await app(scope, receive, self._send)
        finally:
            self._finished = True
            self._changed.set()

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.headers = {
                name.decode("latin-1").lower(): value.decode("latin-1") for name, value in message["headers"]
            }
            self.status = message["status"]
        elif message.get("body"):
            while len(self._chunks) >= MAX_BUFFERED_CHUNKS:
                self._space.clear()
                await self._space.wait()
            self._chunks.append(message["body"])
        self._changed.set()
