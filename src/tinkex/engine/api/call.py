"""A decoded request, as handlers receive it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

from starlette.requests import Request
from starlette.responses import Response

from tinkex.engine.api.request_metrics import RequestMetrics
from tinkex.engine.engine import Engine
from tinkex.types.base import Value


@dataclass(frozen=True)
class Call:
    """One request to an endpoint. ``request`` has the type from the endpoint table; ``body`` is its encoded form."""

    engine: Engine
    owner: str
    request: Any
    body: bytes
    parameters: Mapping[str, str]
    query: Mapping[str, str]
    headers: Mapping[str, str]
    is_local: bool
    """Whether the client runs on this machine, so that it can read its files."""
    http: Request
    """The HTTP request."""
    is_embedded: bool = False
    """Whether the client runs in this process, so that it cannot fetch a URL."""
    body_stream: AsyncIterator[bytes] | None = None
    """The body as a stream, for multipart requests; ``body`` is then empty."""
    request_metrics: RequestMetrics = field(default_factory=RequestMetrics)
    """Metrics of the API, for handlers that count more than requests."""
    audit_details: dict[str, Any] = field(default_factory=dict)
    """Details that the handler adds to the audit log entry."""

    @cached_property
    def origin(self) -> str:
        """The server's scheme, host and port as the client addressed it."""
        return str(self.http.base_url).rstrip("/")


Reply: TypeAlias = Value | Response | None
"""A value to be sent as JSON, a whole response, or None for an empty JSON object."""

Handler: TypeAlias = Callable[[Call], Awaitable[Reply]]
