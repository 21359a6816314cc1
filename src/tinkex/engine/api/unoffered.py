"""Endpoints of the Tinker protocol that this server refuses by name."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tinkex._wire.endpoints import ENDPOINTS
from tinkex.engine.api.errors import error_response
from tinkex.errors import Unsupported


def refusing_routes() -> Sequence[Route]:
    """Routes that say which endpoint is not offered: one for every row that is not served."""
    return [
        Route(row.path, _refuse(row.name), methods=[row.method])
        for row in ENDPOINTS.values()
        if not row.served
    ]


def _refuse(name: str) -> Callable[[Request], Awaitable[Response]]:
    async def refuse(request: Request) -> Response:
        return error_response(
            Unsupported(f"{name} ({request.method} {request.url.path}) is not offered by this server.")
        )

    return refuse
