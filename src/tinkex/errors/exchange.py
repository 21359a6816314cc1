"""What an error says about the request and response that it belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

__all__ = ["HttpRequest", "HttpResponse", "RequestErrorCategory"]


class RequestErrorCategory(StrEnum):
    """The category the server assigns to a failed operation."""

    Unknown = "unknown"
    Server = "server"
    User = "user"

    @classmethod
    def parse(cls, text: object) -> RequestErrorCategory:
        """Parses the wire value; returns ``Unknown`` for any other.

        >>> RequestErrorCategory.parse("user").name
        'User'
        >>> RequestErrorCategory.parse("network").name
        'Unknown'
        """
        try:
            return cls(str(text).strip().lower())
        except ValueError:
            return cls.Unknown

    @classmethod
    def of_reply(cls, status: int, body: object = None) -> RequestErrorCategory:
        """The category that the body of an error states, else that of its status.

        >>> RequestErrorCategory.of_reply(404).name, RequestErrorCategory.of_reply(429).name
        ('User', 'Server')
        """
        given = body.get("category") if isinstance(body, Mapping) else None
        if given is not None:
            return cls.parse(given)
        if status >= 500 or status in {408, 409, 410, 429}:
            return cls.Server
        return cls.User if status >= 400 else cls.Unknown

    @property
    def retryable(self) -> bool:
        """Whether the operation may succeed when it is submitted again: not if the user is at fault.

        >>> RequestErrorCategory.User.retryable, RequestErrorCategory.Server.retryable
        (False, True)
        """
        return self is not RequestErrorCategory.User


@dataclass(frozen=True)
class HttpRequest:
    """The request of an error: method and URL, never headers or body (they may hold secrets)."""

    method: str
    url: str
    endpoint: str | None = None
    """The name of the call in the endpoint table; None where the request is none of the protocol's."""


@dataclass(frozen=True)
class HttpResponse:
    """The response of an error."""

    status_code: int
    headers: Mapping[str, str] = field(default_factory=dict)
    text: str = ""
    request: HttpRequest | None = None
