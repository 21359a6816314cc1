"""Requests to the engine in this process: its web application is called directly, without a socket."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlencode

from tinkex._runtime import on_exit
from tinkex._transport.base import Reply, Request
from tinkex._transport.local_stream import LocalStream
from tinkex.errors import APIConnectionError, APITimeoutError, ClosedError, HttpRequest, SetupError

if TYPE_CHECKING:
    from tinkex.engine.api.embedded import EmbeddedEngine

__all__ = ["LocalTransport"]


class LocalTransport:
    """Calls the embedded engine, which is started at the first request.

    Clients of one process that name the same home share one engine; it stops when the last of them closes.
    """

    def __init__(self, home: Path | None = None, models: Mapping[str, str] | None = None) -> None:
        self._home = home
        self._models = models
        self._embedded: EmbeddedEngine | None = None
        self._opening = asyncio.Lock()
        self._closed = False

    async def send(self, request: Request) -> Reply:
        """Runs one request through the application, on the loop of the caller."""
        about = HttpRequest(request.method, f"local:{request.path}")
        embedded = await self._engine()
        headers = {**request.headers, "host": "local", "x-api-key": embedded.api_key}
        exchange = _Exchange(request.body)
        try:
            async with asyncio.timeout(request.timeout):
                await embedded.app(_scope(request, headers), exchange.receive, exchange.send)
        except TimeoutError as error:
            raise APITimeoutError(
                about, f"the engine did not answer {request.path} within {request.timeout:g} s"
            ) from error
        if exchange.status is None:
            raise APIConnectionError(about, f"the engine ended {request.path} without an answer")
        return Reply(exchange.status, exchange.headers, bytes(exchange.body))

    async def stream(self, request: Request) -> LocalStream:
        """Starts a request whose reply is read while the engine writes it."""
        about = HttpRequest(request.method, f"local:{request.path}")
        embedded = await self._engine()
        headers = {**request.headers, "host": "local", "x-api-key": embedded.api_key}
        body = request.upload if request.upload is not None else request.body
        return await LocalStream.open(embedded.app, _scope(request, headers), body, about, request.timeout)

    async def close(self) -> None:
        """Gives the engine back."""
        self._closed = True
        async with self._opening:
            embedded, self._embedded = self._embedded, None
        if embedded is not None:
            await asyncio.to_thread(embedded.close)

    async def _engine(self) -> EmbeddedEngine:
        if self._embedded is not None:
            return self._embedded
        async with self._opening:
            if self._closed:
                raise ClosedError("this client has given its engine back; make a new one")
            if self._embedded is None:
                # Opening reads files and may convert a model: heartbeats of other clients must not wait for it.
                self._embedded = await asyncio.to_thread(_open, self._home, self._models)
            return self._embedded


class _Exchange:
    """The application's side of one request and reply."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.body = bytearray()

    async def receive(self) -> MutableMapping[str, Any]:
        """Gives the application the whole body, and then nothing until the exchange is over."""
        body, self._body = self._body, None
        if body is None:
            # A client that goes away cancels the call itself, so there is no disconnect to wait for.
            await asyncio.get_running_loop().create_future()
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Takes a part of the reply."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {
                name.decode("latin-1").lower(): value.decode("latin-1")
                for name, value in message.get("headers", ())
            }
        elif message["type"] == "http.response.body":
            self.body += message.get("body", b"")


def _scope(request: Request, headers: Mapping[str, str]) -> dict[str, Any]:
    length = len(request.body) if request.upload is None else request.upload.length
    size = (b"transfer-encoding", b"chunked") if length is None else (b"content-length", b"%d" % length)
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": unquote(request.path),
        "raw_path": request.path.encode("ascii"),
        "root_path": "",
        "query_string": urlencode(request.query).encode("ascii"),
        "headers": [
            *((name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()),
            size,
        ],
        "client": None,
        "server": ("local", None),
        "state": {},
    }


def _open(home: Path | None, models: Mapping[str, str] | None) -> EmbeddedEngine:
    try:
        from tinkex.engine.api.embedded import open_embedded
    except ModuleNotFoundError as error:
        raise SetupError(
            f"base_url='local' runs the engine in this process, which needs {error.name}; "
            "install it with: pip install 'tinkex[engine]'"
        ) from error
    from tinkex.observability.terminal import LoadingLine

    # The engine ends after the clients of this process, which ask to the end.
    return open_embedded(home, models, LoadingLine(sys.stderr).show, at_exit=on_exit)
