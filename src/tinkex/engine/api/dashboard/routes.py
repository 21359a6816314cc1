"""The table of pages, and the routes of the API that they use with a session in place of a key."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from urllib.parse import parse_qs

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from tinkex._wire.endpoints import Endpoint
from tinkex.engine.api.auth import find_key
from tinkex.engine.api.dashboard import checkpoints, overview, playground, rollouts, runs, series, usage
from tinkex.engine.api.dashboard.rendering import SECURITY_HEADERS, static_response
from tinkex.engine.api.dashboard.sign_in import (
    FORM_TOKEN,
    check_same_origin,
    clear_cookie,
    host_of,
    set_cookie,
)
from tinkex.engine.api.dashboard.site import (
    Dashboard,
    Page,
    Visit,
    error_page,
    serve_data,
    serve_page,
    sign_in_page,
)
from tinkex.errors import EngineError, InvalidInput, TooLarge

ACTIONS = frozenset(
    {
        "publish_checkpoint",
        "unpublish_checkpoint",
        "delete_checkpoint",
        "set_checkpoint_ttl",
        "checkpoint_archive",
        "export_session_trace",
        "openai_chat",
        "openai_completions",
    }
)
"""The routes of the API that pages use; all that changes or computes something."""
MAX_FORM_BYTES = 16 * 1024
FORM_TIMEOUT_S = 10.0
_LOCAL_ADDRESS = re.compile(r"/(?![/\\])[^\\\x00-\x20]*")

PAGES: Sequence[tuple[str, Page]] = (
    ("/", overview.overview),
    ("/runs", runs.list_runs),
    ("/runs/{run_id}", runs.show_run),
    ("/runs/{run_id}/rollouts", rollouts.show_rollouts),
    ("/compare", runs.compare),
    ("/checkpoints", checkpoints.list_checkpoints),
    ("/usage", usage.show_usage),
)
PLAYGROUND: Sequence[tuple[str, Page]] = (("/playground", playground.show_playground),)
"""Pages that need an engine."""
DATA: Sequence[tuple[str, Page]] = (
    ("/dashboard/overview/events", overview.follow_overview),
    ("/dashboard/series", series.read_series),
    ("/dashboard/series.csv", series.download_csv),
    ("/dashboard/series/events", series.follow_series),
    ("/dashboard/runs/{run_id}/operations", runs.show_operations),
)


def dashboard_path(endpoint: Endpoint) -> str | None:
    """Where a route of the API is mounted for pages, or None.

    >>> from tinkex._wire.endpoints import endpoint
    >>> dashboard_path(endpoint("publish_checkpoint"))[:34], dashboard_path(endpoint("create_model"))
    ('/dashboard/api/v1/training_runs/{t', None)
    """
    path = endpoint.path
    if endpoint.name not in ACTIONS or not path.startswith(("/api/", "/oai/")):
        return None
    return f"/dashboard{path}"


def dashboard_routes(site: Dashboard) -> Sequence[Route]:
    """Returns the routes of all pages."""
    pages = [*PAGES, *(PLAYGROUND if site.engine is not None else ())]
    routes = [Route(path, serve_page(site, page), methods=["GET"]) for path, page in pages]
    routes += [Route(path, serve_data(site, page), methods=["GET"]) for path, page in DATA]
    routes.append(Route("/dashboard/static/{version}/{name:path}", serve_static, methods=["GET"]))
    if site.has_keys:
        forms = _Forms(site)
        routes += [
            Route("/sign-in", forms.show, methods=["GET"]),
            Route("/sign-in", forms.sign_in, methods=["POST"]),
            Route("/sign-out", forms.sign_out, methods=["POST"]),
        ]
    return routes


async def serve_static(request: Request) -> Response:
    """Returns a script, style or licence; those of another version are not there."""
    found = static_response(request.path_params["name"])
    return found if found is not None else Response("not found", 404, SECURITY_HEADERS)


class _Forms:
    """The forms to sign in and out."""

    def __init__(self, site: Dashboard) -> None:
        self._site = site

    async def show(self, request: Request) -> Response:
        return sign_in_page(self._site, _local_address(request.query_params.get("next", "/")), "", 200)

    async def sign_in(self, request: Request) -> Response:
        site = self._site
        assert site.engine is not None
        assert site.sessions is not None
        try:
            check_same_origin("POST", request.headers)
            form = await _read_form(request)
        except EngineError as error:
            return error_page(site, request, error)
        address = _local_address(form.get("next", "/"))
        key = find_key(site.engine, form.get("key", "").strip())
        if key is None:
            site.failed_logins.record(site.engine, request)
            problem = "This is not a valid API key of this server. The server prints its key when it starts; users get theirs from its operator."
            return sign_in_page(site, address, problem, 401)
        response = RedirectResponse(address, 303, SECURITY_HEADERS)
        set_cookie(request, response, site.sessions.start(key, host_of(request), time.time()))
        return response

    async def sign_out(self, request: Request) -> Response:
        site = self._site
        assert site.sessions is not None
        try:
            check_same_origin("POST", request.headers)
            form = await _read_form(request)
            session = Visit(site, site.viewer(request), request).viewer.session
            assert session is not None, "a server with keys"
            site.check_form_token(session, form.get(FORM_TOKEN, ""))
        except EngineError as error:
            return error_page(site, request, error)
        site.sessions.end(session, time.time())
        response = RedirectResponse("/sign-in", 303, SECURITY_HEADERS)
        clear_cookie(request, response)
        return response


async def _read_form(request: Request) -> dict[str, str]:
    """The fields of a small form."""
    if (
        request.headers.get("content-type", "").partition(";")[0].strip()
        != "application/x-www-form-urlencoded"
    ):
        raise InvalidInput("this address takes the form of its page; open it in a browser.")
    body = b""
    try:
        async with asyncio.timeout(FORM_TIMEOUT_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_FORM_BYTES:
                    raise TooLarge(f"the form has more than {MAX_FORM_BYTES} bytes.")
    except TimeoutError:
        raise InvalidInput("the form did not arrive in time; send it again.") from None
    fields = parse_qs(body.decode("utf-8", "replace"), keep_blank_values=True, max_num_fields=8)
    return {name: values[0] for name, values in fields.items()}


def _local_address(text: str) -> str:
    """An address of this server to continue at, never one of another.

    >>> _local_address("/runs?q=1"), _local_address("//evil.example"), _local_address("https://evil.example")
    ('/runs?q=1', '/', '/')
    """
    return text if _LOCAL_ADDRESS.fullmatch(text) else "/"
