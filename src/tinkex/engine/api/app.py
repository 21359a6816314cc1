"""The ASGI application: one route per row of the endpoint table."""

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
from tinkex.engine.api.decoding import decode_request, read_number
from tinkex.engine.api.errors import error_response, failure_response, json_response
from tinkex.engine.api.held import while_connected
from tinkex.engine.api.limits import BodyTooLarge, Stalled, arriving, check_query, read_body
from tinkex.engine.api.spans import CallTracing
from tinkex.engine.api.storage import StorageTrouble, is_trouble
from tinkex.engine.api.traffic import REQUEST_ID, Traffic, request_id_of
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
"""Calls that carry data of any size; the others name things, and are refused beyond a size no name has."""
SMALL_BODY = 4 * 1024 * 1024
HELD = frozenset({"retrieve_future", "retrieve_futures"})
"""Calls that wait for something to happen, as long as somebody listens."""


class App(Starlette):
    """Starlette, with a short way to the calls whose address has no names in it: nearly all of the traffic."""

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
        """Answer a call."""
        serve = None
        if scope["type"] == "http" and not scope.get("root_path"):
            serve = self._direct.get((scope["method"], scope["path"]))
        if serve is None:
            await super().__call__(scope, receive, send)
        else:
            # What could go wrong in an endpoint is an answer already, so nothing needs to be wrapped around it.
            response = await serve(Request(scope, receive, send))
            await response(scope, receive, send)


def build_app(engine: Engine) -> App:
    """The application that serves an engine.

    Example:
        >>> uvicorn.run(build_app(engine), host="127.0.0.1", port=8787)
    """
    refusals = audit.Refusals()
    traffic, tracing, storage = Traffic(), CallTracing(), StorageTrouble(engine)
    served = [
        Route(
            row.path,
            _endpoint(engine, row, handler, refusals, traffic, tracing, storage),
            methods=[row.method],
        )
        for name, handler in HANDLERS.items()
        for row in [ENDPOINTS[name]]
    ]
    # Exact paths first, the hot ones of sampling and polling at the head. Then the longer of two that both
    # fit: …/checkpoints/{checkpoint_id:path} takes everything behind it, also …/publish.
    exact = [route for route in served if "{" not in route.path]
    named = [route for route in served if route not in exact]
    named.sort(key=lambda route: len(route.path), reverse=True)
    watching = Route("/metrics", _metrics(engine, refusals, traffic), methods=["GET"])
    return App([*exact, *named, watching])


def _endpoint(
    engine: Engine,
    row: Endpoint,
    handler: Handler,
    refusals: audit.Refusals,
    traffic: Traffic,
    tracing: CallTracing,
    storage: StorageTrouble,
) -> Serve:
    largest = engine.config.max_body_bytes
    limit = largest if row.name in LARGE_BODIES else min(largest, SMALL_BODY)
    carries_files = row.request_wire == "multipart"
    reads_body = row.method != "GET" and not carries_files
    is_held = row.name in HELD

    async def serve(request: Request) -> Response:
        started = time.monotonic()
        request_id = request_id_of(request.headers)
        user = [""]
        response = await tracing.answer(answer(request, user), row, request, request_id)
        response.headers[REQUEST_ID] = request_id
        traffic.note(row.name, response.status_code, time.monotonic() - started, request_id, user[0])
        return response

    async def answer(request: Request, user: list[str]) -> Response:
        try:
            if row.name == "healthz":
                storage.look_again()
                engine.integrity.recheck()
            if engine.closed:
                raise _closed()
            user[0] = owner = authenticate(engine, row.name, request.headers)
            if request.scope["query_string"]:
                check_query(row.name, request.query_params)
            # What comes from this process comes as it is read; nobody there can hold up a server.
            stall_s = None if request.client is None else engine.config.request_stall_s
            body = b""
            if reads_body:
                body = await read_body(request, limit, stall_s, is_numbered=row.is_future)
            call = Call(
                engine=engine,
                owner=owner,
                request=_decode(engine, owner, row, body, request.headers.get("content-type", "")),
                body=body,
                parameters=request.path_params,
                query=request.query_params,
                headers=request.headers,
                is_local=request.client is None or request.client.host in LOOPBACK_HOSTS,
                http=request,
                is_embedded=request.client is None,
                incoming=arriving(request, stall_s) if carries_files else None,
                traffic=traffic,
            )
            reply = await (while_connected(request, handler(call)) if is_held else handler(call))
            audit.write_down(row.name, call)
        except Unauthorized as error:
            refusals.note(engine, request)
            return error_response(error)
        except BodyTooLarge as error:
            _use_up(engine, user[0], row, error.start, request.headers.get("content-type", ""))
            return error_response(error)
        except TinkexError as error:
            return error_response(error)
        except sqlite3.Error as error:
            if engine.closed:  # while this call was held
                return error_response(_closed())
            return error_response(storage.refusal(error)) if is_trouble(error) else failure_response(error)
        except Stalled as error:
            return json_response({"detail": str(error)}, 408, {"connection": "close"})
        except ClientDisconnect:
            return json_response({"detail": "the caller hung up before the call was complete"}, 400)
        except Exception as error:  # noqa: BLE001 -- logged and answered
            return failure_response(error)
        return reply if isinstance(reply, Response) else json_response(reply if reply is not None else {})

    return serve


def _closed() -> ModelUnavailable:
    return ModelUnavailable("this engine has been closed; start it again.")


def _decode(engine: Engine, owner: str, row: Endpoint, body: bytes, content_type: str) -> object:
    try:
        return decode_request(row, body, content_type)
    except InvalidInput:
        _use_up(engine, owner, row, body, content_type)
        raise


def _use_up(engine: Engine, owner: str, row: Endpoint, body: bytes, content_type: str) -> None:
    """The client counts a refused submission as sent: its number must not hold up the next ones."""
    turn = read_number(body, content_type) if row.is_future else None
    if turn is not None:
        engine.admission.reject(owner, *turn)


def _metrics(engine: Engine, refusals: audit.Refusals, traffic: Traffic) -> Serve:
    async def serve(request: Request) -> Response:
        try:
            authenticate_operator(engine, request.headers)
            # Sizes are asked of the disk and the database, which may be busy.
            stats = await asyncio.to_thread(engine.stats)
        except Unauthorized as error:
            refusals.note(engine, request)
            return error_response(error)
        except TinkexError as error:
            return error_response(error)
        text = metrics.metrics_text(stats, traffic, __version__)
        return Response(text, media_type=metrics.CONTENT_TYPE)

    return serve


async def _no_such_endpoint(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 404
    detail = f"this server has no endpoint {request.method} {request.url.path}; it speaks the Tinker protocol below /api/v1."
    return json_response({"detail": detail}, status)
