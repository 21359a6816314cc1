"""The transport seam: what every way of reaching a server implements."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from tinkex._wire.endpoints import Purpose
from tinkex.errors import HttpRequest

__all__ = ["Reading", "Reply", "Request", "Transport", "Upload"]


class Reading(Protocol):
    """A body on its way."""

    def __aiter__(self) -> AsyncIterator[bytes]:
        """Its pieces."""
        ...

    def close(self) -> None:
        """Ends the reading wherever it is."""
        ...


class Upload(Protocol):
    """A body that is read while it is sent."""

    content_type: str

    @property
    def length(self) -> int | None:
        """Its size in bytes, if it is known."""
        ...

    @property
    def repeatable(self) -> bool:
        """Whether it can be sent (again)."""
        ...

    def read(self) -> Reading:
        """Starts from the beginning; ``UploadError`` where something cannot be read, or not again."""
        ...


@dataclass(frozen=True, slots=True)
class Request:
    """What goes out; ``path`` starts with ``/api/v1`` and is appended to the transport's address."""

    method: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Not part of its text form: they hold the API key."""
    body: bytes = field(default=b"", repr=False)
    query: Mapping[str, str] = field(default_factory=dict)
    purpose: Purpose = "rest"
    timeout: float = 60.0
    upload: Upload | None = field(default=None, repr=False)
    """Instead of ``body``; ``timeout`` then bounds each wait for progress. Only streams carry it: see ``open_stream``."""
    endpoint: str | None = None
    """The name of the call in the endpoint table, for errors."""

    def about(self, base_url: str) -> HttpRequest:
        """The request as errors show it."""
        return HttpRequest(self.method, base_url + self.path, self.endpoint)


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back, whatever its status; header names are in lower case."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


class Transport(Protocol):
    """Carries requests to a server.

    ``send`` returns the reply whatever its status, and raises ``APIConnectionError`` (or its child
    ``APITimeoutError``) when there is none. It is called on the client's background loop.
    """

    async def send(self, request: Request) -> Reply:
        """Sends one request and waits for its reply."""
        ...

    async def close(self) -> None:
        """Lets go of connections; a later ``send`` is an error."""
        ...
