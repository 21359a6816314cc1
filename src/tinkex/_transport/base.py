"""The transport interface: what every way of reaching a server implements."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from tinkex._wire.endpoints import Purpose
from tinkex.errors import HttpRequest

__all__ = ["BodyReader", "Reply", "Request", "Transport", "Upload"]


class BodyReader(Protocol):
    """One pass over the body of an upload."""

    def __aiter__(self) -> AsyncIterator[bytes]:
        """Yields the body chunk by chunk."""
        ...

    def close(self) -> None:
        """Stops reading and closes the files that were opened."""
        ...


class Upload(Protocol):
    """A request body that is read while it is sent."""

    content_type: str

    @property
    def length(self) -> int | None:
        """The size in bytes; None if it is unknown."""
        ...

    @property
    def repeatable(self) -> bool:
        """Whether the body can be read from the beginning (again)."""
        ...

    def read(self) -> BodyReader:
        """Starts reading from the beginning; raises ``UploadError`` if that is not possible."""
        ...


@dataclass(frozen=True, slots=True)
class Request:
    """A request; ``path`` starts with a slash and is appended to the transport's base URL as it is."""

    method: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Left out of the repr: they hold the API key."""
    body: bytes = field(default=b"", repr=False)
    query: Mapping[str, str] = field(default_factory=dict)
    purpose: Purpose = "rest"
    timeout: float = 60.0
    upload: Upload | None = field(default=None, repr=False)
    """Replaces ``body``; ``timeout`` then bounds each wait for progress. Only streams carry it: see ``open_stream``."""
    endpoint: str | None = None
    """The name of the call in the endpoint table, for errors."""
    shown_path: str | None = None
    """What errors and logs show instead of ``path``, where that holds a signature."""

    def about(self, base_url: str) -> HttpRequest:
        """The request as errors show it."""
        return HttpRequest(self.method, base_url + (self.shown_path or self.path), self.endpoint)


@dataclass(frozen=True, slots=True)
class Reply:
    """A response, whatever its status; header names are in lower case."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


class Transport(Protocol):
    """Sends requests to a server.

    ``send`` returns the reply whatever its status, and raises ``APIConnectionError`` (or its subclass
    ``APITimeoutError``) if there is none. It is called on the client's background loop.
    """

    async def send(self, request: Request) -> Reply:
        """Sends one request and waits for its reply."""
        ...

    async def close(self) -> None:
        """Closes all connections; a later ``send`` is an error."""
        ...
