"""A server made of one function of yours."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

from tinkex._transport.base import Reply, Request
from tinkex._wire import json

__all__ = ["Handler", "MockTransport", "Reply", "Request", "reply"]

Handler: TypeAlias = Callable[[Request], Reply | Awaitable[Reply]]


class MockTransport:
    """Answers requests with a function of yours, plain or async; errors it raises reach the client.

    ``requests`` holds every request in the order of arrival.
    """

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self.requests: list[Request] = []
        self.closed = False

    async def send(self, request: Request) -> Reply:
        """Hands one request to the handler."""
        self.requests.append(request)
        answer = self._handler(request)
        return await answer if inspect.isawaitable(answer) else answer

    async def close(self) -> None:
        """Notes that the client let go."""
        self.closed = True

    @property
    def paths(self) -> list[str]:
        """The paths of all requests, without ``/api/v1/``."""
        return [request.path.removeprefix("/api/v1/") for request in self.requests]


def reply(value: Any = None, status: int = 200, headers: Mapping[str, str] | None = None) -> Reply:
    """A reply: bytes as protobuf, anything else as JSON.

    >>> reply({"request_id": "r1"}).body
    b'{"request_id":"r1"}'
    """
    if isinstance(value, bytes):
        return Reply(status, {"content-type": "application/x-protobuf", **(headers or {})}, value)
    body = b"" if value is None else json.encode(value, omit_none=False)
    return Reply(status, {"content-type": "application/json", **(headers or {})}, body)
