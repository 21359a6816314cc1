"""A decoded request, as handlers receive it."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from tinkex.engine.api.body_budget import BodyReservation
from tinkex.engine.api.request_metrics import RequestMetrics
from tinkex.engine.config import LOOPBACK_HOSTS
from tinkex.engine.engine import Engine
from tinkex.engine.store import KeyRow
from tinkex.types.base import Value

T = TypeVar("T")


@dataclass(eq=False)
class Call:
    """One request to an endpoint. ``request`` has the type from the endpoint table; ``body`` is its encoded form."""

    engine: Engine
    owner: str
    request: Any
    body: bytes
    headers: Mapping[str, str]
    http: Request
    """The HTTP request."""
    is_embedded: bool = False
    """Whether the client runs in this process, so that it cannot fetch a URL."""
    body_stream: AsyncIterator[bytes] | None = None
    """The body as a stream, for forms and files; ``body`` is then empty."""
    request_metrics: RequestMetrics = field(default_factory=RequestMetrics)
    """Metrics of the API, for handlers that count more than requests."""
    reply: BodyReservation | None = None
    """Counts the bytes of a large reply; None for a client in this process."""
    key: KeyRow | None = None
    """The key that the request was authenticated with; None if it needs none."""
    audit_details: dict[str, Any] = field(default_factory=dict)
    """Details that the handler adds to the audit log entry."""

    async def run_on_thread(self, job: Callable[[], T]) -> T:
        """Run what takes long while the event loop serves others; the jobs of one user run one after the other."""
        return await self.engine.run_on_thread(self.owner, job)

    @property
    def parameters(self) -> Mapping[str, str]:
        """The parameters in the path."""
        return self.http.path_params

    @property
    def query(self) -> Mapping[str, str]:
        """The query parameters."""
        return self.http.query_params

    @property
    def is_local(self) -> bool:
        """Whether the client runs on this machine, so that it can read its files; one behind any proxy may not."""
        client = self.http.client
        return client is None or (client.host in LOOPBACK_HOSTS and "x-forwarded-for" not in self.headers)

    def is_client_before(self, version: tuple[int, int]) -> bool:
        """Whether an official client of an earlier version sent this; their models reject what later ones added."""
        sent = re.match(r"(\d+)\.(\d+)", self.headers.get("x-stainless-package-version", ""))
        return sent is not None and (int(sent[1]), int(sent[2])) < version

    @cached_property
    def origin(self) -> str:
        """The server's scheme, host and port as the client addressed it."""
        return str(self.http.base_url).rstrip("/")


Reply: TypeAlias = Value | Response | None
"""A value to be sent as JSON, a whole response, or None for an empty JSON object."""

Handler: TypeAlias = Callable[[Call], Awaitable[Reply]]
