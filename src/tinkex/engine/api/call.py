"""One call of a client, as handlers see it: who asks, what for, with everything decoded."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

from starlette.requests import Request
from starlette.responses import Response

from tinkex.engine.api.traffic import Traffic
from tinkex.engine.engine import Engine
from tinkex.types.base import Value


@dataclass(frozen=True)
class Call:
    """A decoded call. ``request`` has the type the endpoint table names; ``body`` is what it was decoded from."""

    engine: Engine
    owner: str
    request: Any
    body: bytes
    parameters: Mapping[str, str]
    query: Mapping[str, str]
    headers: Mapping[str, str]
    is_local: bool
    """Whether the caller is on this machine, and so can read files of it."""
    http: Request
    """The call as it came over HTTP."""
    is_embedded: bool = False
    """Whether the caller is in this process, and reaches no address."""
    incoming: AsyncIterator[bytes] | None = None
    """The body as it arrives, for calls that carry files; ``body`` is then empty."""
    traffic: Traffic = field(default_factory=Traffic)
    """What passes through the API, for handlers that count more than calls."""
    about: dict[str, Any] = field(default_factory=dict)
    """What the handler adds to the entry in the audit log."""

    @cached_property
    def origin(self) -> str:
        """Where the caller reaches this server: scheme, host and port."""
        return str(self.http.base_url).rstrip("/")


Reply: TypeAlias = Value | Response | None
"""A value to be sent as JSON, a whole response, or None for "done" with nothing to say."""

Handler: TypeAlias = Callable[[Call], Awaitable[Reply]]
