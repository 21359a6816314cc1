"""The ASGI application: one route per entry of the endpoint table."""

from __future__ import annotations

import asyncio
import dataclasses
import sqlite3
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeAlias

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tinkex._version import __version__
from tinkex._wire.endpoints import ENDPOINTS, Endpoint
from tinkex.engine.api import (
    assets,
    audit,
    copying,
    downloads,
    futures,
    identity,
    loop_records,
    metrics,
    runs,
    sampling,
    search,
    sessions,
    streaming,
    tokenizers,
    training,
    uploads,
    usage,
)
from tinkex.engine.api.auth import Authenticated, authenticate, authenticate_operator
from tinkex.engine.api.bodies import BodyStalled, DecodedBody, RejectedBody, RequestBodyReader, stream_body
from tinkex.engine.api.body_budget import BodyBudget, BodyReservation
from tinkex.engine.api.call import Call, Handler
from tinkex.engine.api.compatible.routes import ROUTE_HANDLERS, ROUTES
from tinkex.engine.api.dashboard.routes import dashboard_path, dashboard_routes
from tinkex.engine.api.dashboard.site import Dashboard
from tinkex.engine.api.dialects import dialect_of
from tinkex.engine.api.errors import detail_response, error_response, failure_response, json_response
from tinkex.engine.api.limits import check_query
from tinkex.engine.api.long_poll import cancel_on_disconnect
from tinkex.engine.api.origins import restrict_origins
from tinkex.engine.api.replies import LargeReply, bounded, reply_budget
from tinkex.engine.api.request_metrics import REQUEST_ID, RequestMetrics, request_id_of
from tinkex.engine.api.spans import CallTracing
from tinkex.engine.api.storage import StorageErrors, is_storage_error
from tinkex.engine.engine import Engine
from tinkex.errors import ModelUnavailable, TinkexError, Unauthorized

HANDLERS: Mapping[str, Handler] = {
    **sampling.HANDLERS,
    **streaming.HANDLERS,
    **futures.HANDLERS,
    **training.HANDLERS,
    **sessions.HANDLERS,
    **runs.HANDLERS,
    **loop_records.HANDLERS,
    **search.HANDLERS,
    **tokenizers.HANDLERS,
    **identity.HANDLERS,
    **downloads.HANDLERS,
    **copying.HANDLERS,
    **uploads.HANDLERS,
    **assets.HANDLERS,
    **audit.HANDLERS,
    **usage.HANDLERS,
}


Serve: TypeAlias = Callable[[Request], Awaitable[Response]]

CLIENT_CLOSED_REQUEST = 499
"""The status in the log for a client that disconnected; no client receives it."""
_REQUEST_ID = REQUEST_ID.encode()
STREAMED = frozenset({"multipart", "bytes"})
"""Encodings of bodies that handlers read while they arrive."""
LONG_POLLS = frozenset({"retrieve_future", "retrieve_futures"})
"""Endpoints whose handlers are cancelled when the client disconnects, as are those of the compatible routes."""


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


Identify: TypeAlias = Callable[[Request, Mapping[str, str], Endpoint], Authenticated]
"""Returns who sent a request, or raises why it is rejected."""


def build_app(engine: Engine, *, dashboard: bool = False) -> ASGIApp:
    """Returns the application that serves an engine, with or without the pages of the dashboard.

    Example:
        >>> uvicorn.run(build_app(engine, dashboard=True), host="127.0.0.1", port=8787)
    """
    failed_logins, audited_calls = audit.FailedLogins(), audit.AuditedCalls()
    request_metrics, tracing, storage = RequestMetrics(), CallTracing(), StorageErrors(engine)
    bodies, replies = (
        RequestBodyReader(engine.config.max_body_bytes),
        reply_budget(engine.config.max_body_bytes),
    )
    served = [(ENDPOINTS[name], handler) for name, handler in HANDLERS.items()]
    served += [
        (dataclasses.replace(route, path=path), ROUTE_HANDLERS[route.name])
        for route in ROUTES
        for path in route.paths
    ]

    def route(endpoint: Endpoint, handler: Handler, identify: Identify) -> Route:
        serve = _serve(
            engine,
            endpoint,
            handler,
            identify,
            failed_logins,
            audited_calls,
            request_metrics,
            tracing,
            storage,
            bodies,
            replies,
        )
        return Route(endpoint.path, serve, methods=[endpoint.method])

    def by_key(_request: Request, headers: Mapping[str, str], endpoint: Endpoint) -> Authenticated:
        accepts_bearer = dialect_of(endpoint.path).accepts_bearer
        return authenticate(engine, endpoint.name, headers, accepts_bearer=accepts_bearer)

    routes = [route(endpoint, handler, by_key) for endpoint, handler in served]
    if dashboard:
        board = Dashboard(
            engine.store.reader, engine, failed_logins, request_metrics, engine.store.run_changes
        )
        routes += [
            route(dataclasses.replace(endpoint, path=path), handler, board.identify)
            for endpoint, handler in served
            if (path := dashboard_path(endpoint)) is not None
        ]
        routes += dashboard_routes(board)
    # Exact paths first, starting with the hot ones of sampling and polling. Then the longest path first:
    # …/checkpoints/{checkpoint_id:path} also matches …/publish.
    exact = [route for route in routes if "{" not in route.path]
    parametrized = [route for route in routes if route not in exact]
    parametrized.sort(key=lambda route: len(route.path), reverse=True)
    metrics_route = Route("/metrics", _metrics(engine, failed_logins, request_metrics), methods=["GET"])
    return restrict_origins(App([*exact, *parametrized, metrics_route]), engine.config)


def _serve(
    engine: Engine,
    endpoint: Endpoint,
    handler: Handler,
    identify: Identify,
    failed_logins: audit.FailedLogins,
    audited_calls: audit.AuditedCalls,
    request_metrics: RequestMetrics,
    tracing: CallTracing,
    storage: StorageErrors,
    bodies: RequestBodyReader,
    replies: BodyBudget,
) -> Serve:
    streams_body = endpoint.request_wire in STREAMED
    reads_body = endpoint.method != "GET" and not streams_body
    is_long_poll = endpoint.name in LONG_POLLS or endpoint.name in ROUTE_HANDLERS
    dialect = dialect_of(endpoint.path)

    async def serve(request: Request) -> Response:
        started = time.monotonic()
        headers = read_headers(request.scope["headers"])
        request_id = request_id_of(headers)
        user = [""]
        response = await tracing.trace(handle(request, headers, user), endpoint, request, request_id)
        response.raw_headers.append((_REQUEST_ID, request_id.encode()))
        duration_s = time.monotonic() - started
        request_metrics.record(endpoint.name, response.status_code, duration_s, request_id, user[0])
        return response

    async def handle(request: Request, headers: Mapping[str, str], user: list[str]) -> Response:
        reservation: BodyReservation | None = None
        unsent: BodyReservation | None = None
        response: Response | None = None
        try:
            if endpoint.name == "healthz":
                storage.recheck()
                engine.integrity.recheck()
            if engine.closed:
                raise _closed()
            caller = identify(request, headers, endpoint)
            user[0] = owner = caller.user
            if request.scope["query_string"]:
                check_query(endpoint.name, request.query_params)
            client = request.scope.get("client")
            # In-process requests never stall: the body is passed as a whole.
            stall_s = None if client is None else engine.config.request_stall_s
            decoded = DecodedBody(None, b"")
            if reads_body:
                reservation = BodyReservation(bodies.budget, owner)
                decoded = await bodies.read(request, headers, endpoint, stall_s, reservation)
            if client is not None:
                unsent = BodyReservation(replies, owner)
            call = Call(
                engine=engine,
                owner=owner,
                request=decoded.request,
                body=decoded.body,
                headers=headers,
                http=request,
                is_embedded=client is None,
                body_stream=stream_body(request, stall_s) if streams_body else None,
                request_metrics=request_metrics,
                reply=unsent,
                key=caller.key,
            )
            reply = await (cancel_on_disconnect(request, handler(call)) if is_long_poll else handler(call))
            audited_calls.record(endpoint.name, call)
            response = (
                reply if isinstance(reply, Response) else json_response(reply if reply is not None else {})
            )
            if unsent is not None:
                response = bounded(response, unsent)
        except Unauthorized as error:
            failed_logins.record(engine, request)
            return error_response(error, dialect)
        except RejectedBody as rejected:
            if rejected.sequence is not None:
                # The client counts its number as sent, and later ones must not wait for it.
                engine.admission.reject(user[0], *rejected.sequence)
            return error_response(rejected.error, dialect)
        except TinkexError as error:
            return error_response(error, dialect)
        except sqlite3.Error as error:
            if engine.closed:  # during a long poll
                return error_response(_closed(), dialect)
            if is_storage_error(error):
                return error_response(storage.record(error), dialect)
            return failure_response(error, dialect)
        except BodyStalled as error:
            return detail_response(str(error), 408, dialect, {"connection": "close"})
        except ClientDisconnect:
            detail = "the client disconnected before the request was complete"
            return detail_response(detail, CLIENT_CLOSED_REQUEST, dialect)
        except Exception as error:  # noqa: BLE001 -- logged, and a 500 for the client
            return failure_response(error, dialect)
        finally:
            if reservation is not None:
                reservation.release()
            if unsent is not None and not isinstance(response, LargeReply):
                unsent.release()
        assert response is not None
        return response

    return serve


def read_headers(headers: Sequence[tuple[bytes, bytes]]) -> Mapping[str, str]:
    """Returns the headers of a request by their names in lower case; the first of several with one name.

    >>> read_headers([(b"accept", b"text/html"), (b"accept", b"*/*")])
    {'accept': 'text/html'}
    """
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(headers)}


def _closed() -> ModelUnavailable:
    return ModelUnavailable("this engine is closed; start it again.")


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
    dialect = dialect_of(request.url.path)
    detail = f"this server has no endpoint {request.method} {request.url.path}; {dialect.has}."
    return detail_response(detail, status, dialect)
