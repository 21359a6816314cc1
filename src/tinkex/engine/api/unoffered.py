"""Endpoints of the Tinker protocol that this server refuses by name."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tinkex._wire.endpoints import ENDPOINTS
from tinkex.engine.api.errors import error_response
from tinkex.errors import Unsupported

_CHECKPOINT = "/api/v1/training_runs/{training_run_id}/checkpoints/{checkpoint_id:path}"

UNOFFERED: Mapping[str, tuple[str, str]] = {
    "auth_token": ("POST", "/api/v1/auth/token"),
    "get_own_key": ("GET", "/api/v1/auth/apikey/me"),
    "delete_own_key": ("DELETE", "/api/v1/auth/apikey/me"),
    "join_sampling_session": ("POST", "/api/v1/join_sampling_session"),
    "retrieve_futures": ("POST", "/api/v1/retrieve_futures"),
    "save_weights_external": ("POST", "/api/v1/save_weights_external"),
    "create_custom_loss": ("POST", "/api/v1/create_custom_loss"),
    "publish_checkpoint": ("POST", f"{_CHECKPOINT}/publish"),
    "unpublish_checkpoint": ("DELETE", f"{_CHECKPOINT}/publish"),
    "set_checkpoint_ttl": ("PUT", f"{_CHECKPOINT}/ttl"),
    "external_weights_urls": ("GET", f"{_CHECKPOINT}/external_weights_urls"),
    "checkpoint_archive": ("GET", f"{_CHECKPOINT}/archive"),
    "copy_weights": ("POST", "/api/v1/copy_weights"),
    "search_sessions": ("POST", "/api/v1/sessions/search"),
    "assign_session_project": ("PUT", "/api/v1/sessions/{session_id}/project"),
    "export_session_trace": ("GET", "/api/v1/sessions/{session_id}/trace_export"),
    "audit_log": ("GET", "/api/v1/audit"),
    "billing_usage": ("GET", "/api/v1/billing/usage/events"),
    "checkpoint_storage_usage": ("GET", "/api/v1/billing/usage/checkpoints/current"),
}
"""Method and path of each; a row of the endpoint table with the same method and path takes its place."""


def refusing_routes() -> Sequence[Route]:
    """Routes that say which endpoint is not offered; they go before the served ones, which are less specific."""
    offered = {(row.method, _shape(row.path)) for row in ENDPOINTS.values()}
    return [
        Route(path, _refuse(name), methods=[method])
        for name, (method, path) in UNOFFERED.items()
        if (method, _shape(path)) not in offered
    ]


def _shape(path: str) -> str:
    """A path without the names of its parameters."""
    return re.sub(r"{[^}]*}", "{}", path)


def _refuse(name: str) -> Callable[[Request], Awaitable[Response]]:
    async def refuse(request: Request) -> Response:
        return error_response(
            Unsupported(f"{name} ({request.method} {request.url.path}) is not offered by this server.")
        )

    return refuse
