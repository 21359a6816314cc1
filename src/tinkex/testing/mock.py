"""A mock server: a transport that calls a handler function."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from tinkex._transport.base import Reply, Request
from tinkex._wire import json, proto
from tinkex.types import SampledSequence, SampleResponse

__all__ = ["Handler", "MockTransport", "Reply", "Request", "reply", "sample_reply"]

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
        given = await answer if inspect.isawaitable(answer) else answer
        return replace(given, headers={name.lower(): value for name, value in given.headers.items()})

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


def sample_reply(*sequences: Sequence[int], logprob: float = -1.0) -> Reply:
    """Builds the result of a sample, for ``retrieve_future``: a sequence of tokens each, that stopped by itself.

    >>> sample_reply([1, 2], [3]).headers["content-type"]
    'application/x-protobuf'
    """
    made = [
        SampledSequence("stop", "", np.asarray(one, np.int32), np.full(len(one), logprob, np.float32))
        for one in sequences
    ]
    return reply(proto.encode_sample_response(SampleResponse(made)))
