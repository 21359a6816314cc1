"""Server spans of requests, as children of the trace context in their headers; submitted operations continue the trace."""

from __future__ import annotations

import os
from collections.abc import Awaitable
from typing import TYPE_CHECKING, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from tinkex._wire.endpoints import Endpoint
from tinkex.engine.running.spans import call_context
from tinkex.observability.tracing import end_span, extract_context, find_tracer, log_errors

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span

T = TypeVar("T", bound=Response)

NEVER_ROOT = frozenset({"session_heartbeat", "healthz", "telemetry", "retrieve_future", "retrieve_futures"})
"""Endpoints that never start a trace: their requests are frequent, and a root span for each would be noise."""


class CallTracing:
    """Creates the spans of requests, unless ``TINKEX_TRACING=0`` disables tracing."""

    def __init__(self) -> None:
        self._enabled = os.environ.get("TINKEX_TRACING", "").strip().lower() not in {
            "0",
            "false",
            "no",
            "off",
        }

    async def trace(self, response: Awaitable[T], endpoint: Endpoint, request: Request, request_id: str) -> T:
        """Await a response within a span."""
        tracer = find_tracer() if self._enabled else None
        if tracer is None:
            return await response
        from opentelemetry.trace import SpanKind, get_current_span, set_span_in_context

        context = extract_context(request.headers)
        # The embedded engine continues the user's traces and starts none.
        may_be_root = request.client is not None and endpoint.name not in NEVER_ROOT
        if not may_be_root and not get_current_span(context).get_span_context().is_valid:
            return await response
        route = endpoint.path.replace(":path}", "}")
        attributes = {
            "http.request.method": endpoint.method,
            "http.route": route,
            "url.scheme": request.url.scheme,
            "tinkex.call_id": request_id,
        }
        span = log_errors(tracer.start_span)(
            f"{endpoint.method} {route}", context, SpanKind.SERVER, attributes
        )
        if span is None:
            return await response
        return await _await_in_span(span, set_span_in_context(span, context), response)


async def _await_in_span(span: Span, context: Context, awaitable: Awaitable[T]) -> T:
    from opentelemetry.context import attach, detach
    from opentelemetry.trace import Status, StatusCode

    call_token, otel_token = call_context.set(context), attach(context)
    try:
        response = await awaitable
    except BaseException as error:
        log_errors(end_span)(span, error)
        raise
    finally:
        detach(otel_token)
        call_context.reset(call_token)
    span.set_attribute("http.response.status_code", response.status_code)
    if response.status_code >= 500:
        span.set_attribute("error.type", str(response.status_code))
        span.set_status(Status(StatusCode.ERROR, f"status {response.status_code}"))
    log_errors(end_span)(span)
    return response
