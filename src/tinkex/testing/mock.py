"""A mock server: a transport that calls a handler function."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

from tinkex._transport.base import Reply, Request
from tinkex._wire import json

__all__ = ["Handler", "MockTransport", "Reply", "Request", "reply"]

Handler: TypeAlias = Callable[[Request], Reply | Awaitable[Reply]]


class MockTransport:
    """Answers requests with a handler function, sync or async; the client raises the handler's exceptions.

    ``requests`` holds every request in the order received.
    """

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self.requests: list[Request] = []
        self.closed = False

    async def send(self, request: Request) -> Reply:
        """Passes one request to the handler."""
        self.requests.append(request)
        answer = self._handler(request)
        return await answer if inspect.isawaitable(answer) else answer

    async def close(self) -> None:
        """Records that the client closed the transport."""
        self.closed = True

    @property
    def paths(self) -> list[str]:
        """The paths of all requests, without ``/api/v1/``."""
        return [request.path.removeprefix("/api/v1/") for request in self.requests]


def reply(value: Any = None, status: int = 200, headers: Mapping[str, str] | None = None) -> Reply:
    """Builds a reply: bytes as protobuf, anything else as JSON.

    >>> reply({"request_id": "r1"}).body
    b'{"request_id":"r1"}'
    """
    if isinstance(value, bytes):
        return Reply(status, {"content-type": "application/x-protobuf", **(headers or {})}, value)
    body = b"" if value is None else json.encode(value, omit_none=False)
    return Reply(status, {"content-type": "application/json", **(headers or {})}, body)
