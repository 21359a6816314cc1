"""The ASGI application: one route per entry of the endpoint table."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeAlias

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tinkex._version import __version__
from tinkex._wire.endpoints import ENDPOINTS, Endpoint
from tinkex.engine.api import (
    assets,
    audit,
    copying,
    downloads,
    futures,
    identity,
    metrics,
    runs,
    sampling,
    search,
    sessions,
    streaming,
    tokenizers,
    training,
    usage,
)
from tinkex.engine.api.auth import authenticate, authenticate_operator
from tinkex.engine.api.call import Call, Handler
from tinkex.engine.api.decoding import decode_request, read_seq_id
from tinkex.engine.api.errors import error_response, failure_response, json_response
from tinkex.engine.api.limits import BodyStalled, BodyTooLarge, check_query, read_body, stream_body
from tinkex.engine.api.long_poll import cancel_on_disconnect
from tinkex.engine.api.request_metrics import REQUEST_ID, RequestMetrics, request_id_of
from tinkex.engine.api.spans import CallTracing
from tinkex.engine.api.storage import StorageErrors, is_storage_error
from tinkex.engine.config import LOOPBACK_HOSTS
from tinkex.engine.engine import Engine
from tinkex.errors import InvalidInput, ModelUnavailable, TinkexError, Unauthorized

HANDLERS: Mapping[str, Handler] = {
    **sampling.HANDLERS,
    **streaming.HANDLERS,
    **futures.HANDLERS,
    **training.HANDLERS,
    **sessions.HANDLERS,
    **runs.HANDLERS,
    **search.HANDLERS,
    **tokenizers.HANDLERS,
    **identity.HANDLERS,
    **downloads.HANDLERS,
    **copying.HANDLERS,
    **assets.HANDLERS,
    **audit.HANDLERS,
    **usage.HANDLERS,
}


Serve: TypeAlias = Callable[[Request], Awaitable[Response]]

LARGE_BODIES = frozenset(
    {"forward_backward", "forward", "asample", "stream_sample", "create_custom_loss", "telemetry"}
)
"""Endpoints whose bodies are limited only by ``max_body_bytes``; the others are limited to ``MAX_SMALL_BODY_BYTES``."""
MAX_SMALL_BODY_BYTES = 4 * 1024 * 1024
LONG_POLLS = frozenset({"retrieve_future", "retrieve_futures"})
"""Endpoints whose handlers are cancelled when the client disconnects."""


class App(Starlette):
    """Starlette with a fast path for routes without path parameters, which serve nearly all requests."""

    def __init__(self, routes: Sequence[Route]) -> None:
        super().__init__(routes=routes, exception_handlers={404: _no_such_endpoint, 405: _no_such_endpoint})
        self._direct: dict[tuple[str, str], Serve] = {
            (method, route.path): route.endpoint
            for route in routes
            if "{" not in route.path
            for method in route.methods or ()
            if method != "HEAD"
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        serve = None
        if scope["type"] == "http" and not scope.get("root_path"):
            serve = self._direct.get((scope["method"], scope["path"]))
        if serve is None:
            await super().__call__(scope, receive, send)
        else:
            # The endpoint turns every error into a response, so no middleware is needed.
            response = await serve(Request(scope, receive, send))
            await response(scope, receive, send)


def build_app(engine: Engine) -> App:
    """Returns the application that serves an engine.

    Example:
        >>> uvicorn.run(build_app(engine), host="127.0.0.1", port=8787)
    """
    failed_logins = audit.FailedLogins()
    request_metrics, tracing, storage = RequestMetrics(), CallTracing(), StorageErrors(engine)
    routes = [
        Route(
            endpoint.path,
            _serve(engine, endpoint, handler, failed_logins, request_metrics, tracing, storage),
            methods=[endpoint.method],
        )
        for name, handler in HANDLERS.items()
        for endpoint in [ENDPOINTS[name]]
    ]
    # Exact paths first, starting with the hot ones of sampling and polling. Then the longest path first:
    # …/checkpoints/{checkpoint_id:path} also matches …/publish.
    exact = [route for route in routes if "{" not in route.path]
    parametrized = [route for route in routes if route not in exact]
    parametrized.sort(key=lambda route: len(route.path), reverse=True)
    metrics_route = Route("/metrics", _metrics(engine, failed_logins, request_metrics), methods=["GET"])
    return App([*exact, *parametrized, metrics_route])


def _serve(
    engine: Engine,
    endpoint: Endpoint,
    handler: Handler,
    failed_logins: audit.FailedLogins,
    request_metrics: RequestMetrics,
    tracing: CallTracing,
    storage: StorageErrors,
) -> Serve:
    max_body_bytes = engine.config.max_body_bytes
    if endpoint.name not in LARGE_BODIES:
        max_body_bytes = min(max_body_bytes, MAX_SMALL_BODY_BYTES)
    is_multipart = endpoint.request_wire == "multipart"
    reads_body = endpoint.method != "GET" and not is_multipart
    is_long_poll = endpoint.name in LONG_POLLS

    async def serve(request: Request) -> Response:
        started = time.monotonic()
        request_id = request_id_of(request.headers)
        user = [""]
        response = await tracing.trace(handle(request, user), endpoint, request, request_id)
        response.headers[REQUEST_ID] = request_id
        duration_s = time.monotonic() - started
        request_metrics.record(endpoint.name, response.status_code, duration_s, request_id, user[0])
        return response

    async def handle(request: Request, user: list[str]) -> Response:
        try:
            if endpoint.name == "healthz":
                storage.recheck()
                engine.integrity.recheck()
            if engine.closed:
                raise _closed()
            user[0] = owner = authenticate(engine, endpoint.name, request.headers)
            if request.scope["query_string"]:
                check_query(endpoint.name, request.query_params)
            # In-process requests never stall: the body is passed as a whole.
            stall_s = None if request.client is None else engine.config.request_stall_s
            body = b""
            if reads_body:
                body = await read_body(request, max_body_bytes, stall_s, has_seq_id=endpoint.is_future)
            call = Call(
                engine=engine,
                owner=owner,
                request=_decode(engine, owner, endpoint, body, request.headers.get("content-type", "")),
                body=body,
                parameters=request.path_params,
                query=request.query_params,
                headers=request.headers,
                is_local=request.client is None or request.client.host in LOOPBACK_HOSTS,
                http=request,
                is_embedded=request.client is None,
                body_stream=stream_body(request, stall_s) if is_multipart else None,
                request_metrics=request_metrics,
            )
            reply = await (cancel_on_disconnect(request, handler(call)) if is_long_poll else handler(call))
            audit.record(endpoint.name, call)
        except Unauthorized as error:
            failed_logins.record(engine, request)
            return error_response(error)
        except BodyTooLarge as error:
            _reject_seq_id(engine, user[0], endpoint, error.prefix, request.headers.get("content-type", ""))
            return error_response(error)
        except TinkexError as error:
            return error_response(error)
        except sqlite3.Error as error:
            if engine.closed:  # during a long poll
                return error_response(_closed())
            return (
                error_response(storage.record(error)) if is_storage_error(error) else failure_response(error)
            )
        except BodyStalled as error:
            return json_response({"detail": str(error)}, 408, {"connection": "close"})
        except ClientDisconnect:
            return json_response({"detail": "the client disconnected before the request was complete"}, 400)
        except Exception as error:  # noqa: BLE001 -- logged, and a 500 for the client
            return failure_response(error)
        return reply if isinstance(reply, Response) else json_response(reply if reply is not None else {})

    return serve


def _closed() -> ModelUnavailable:
    return ModelUnavailable("this engine is closed; start it again.")


def _decode(engine: Engine, owner: str, endpoint: Endpoint, body: bytes, content_type: str) -> object:
    try:
        return decode_request(endpoint, body, content_type)
    except InvalidInput:
        _reject_seq_id(engine, owner, endpoint, body, content_type)
        raise


def _reject_seq_id(engine: Engine, owner: str, endpoint: Endpoint, body: bytes, content_type: str) -> None:
    """Mark the seq_id of a rejected submission as used: the client counts it as sent, and later ones must not wait for it."""
    found = read_seq_id(body, content_type) if endpoint.is_future else None
    if found is not None:
        engine.admission.reject(owner, *found)


def _metrics(engine: Engine, failed_logins: audit.FailedLogins, request_metrics: RequestMetrics) -> Serve:
    async def serve(request: Request) -> Response:
        try:
            authenticate_operator(engine, request.headers)
            # On a thread: it reads sizes from the disk and the database, which may be busy.
            stats = await asyncio.to_thread(engine.stats)
        except Unauthorized as error:
            failed_logins.record(engine, request)
            return error_response(error)
        except TinkexError as error:
            return error_response(error)
        text = metrics.metrics_text(stats, request_metrics, __version__)
        return Response(text, media_type=metrics.CONTENT_TYPE)

    return serve


async def _no_such_endpoint(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 404
    detail = (
        f"this server has no endpoint {request.method} {request.url.path}; the Tinker API is under /api/v1."
    )
    return json_response({"detail": detail}, status)
