"""The span of a call, in the trace that its headers name; the operations it submits go on from there."""

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

NEVER_FIRST = frozenset({"session_heartbeat", "healthz", "telemetry", "retrieve_future", "retrieve_futures"})
"""Calls that are part of a trace or of none: they come all the time, and tell nothing by themselves."""


class CallTracing:
    """Makes the spans of calls, unless ``TINKEX_TRACING=0`` rules them out."""

    def __init__(self) -> None:
        self._on = os.environ.get("TINKEX_TRACING", "").strip().lower() not in {"0", "false", "no", "off"}

    async def answer(self, answering: Awaitable[T], row: Endpoint, request: Request, request_id: str) -> T:
        """The answer to a call; a span lasts until it is there."""
        tracer = find_tracer() if self._on else None
        if tracer is None:
            return await answering
        from opentelemetry.trace import SpanKind, get_current_span, set_span_in_context

        context = extract_context(request.headers)
        # The engine in the user's own process goes on with their traces and begins none.
        begins = request.client is not None and row.name not in NEVER_FIRST
        if not begins and not get_current_span(context).get_span_context().is_valid:
            return await answering
        route = row.path.replace(":path}", "}")
        facts = {
            "http.request.method": row.method,
            "http.route": route,
            "url.scheme": request.url.scheme,
            "tinkex.call_id": request_id,
        }
        span = log_errors(tracer.start_span)(f"{row.method} {route}", context, SpanKind.SERVER, facts)
        if span is None:
            return await answering
        return await _inside(span, set_span_in_context(span, context), answering)


async def _inside(span: Span, context: Context, answering: Awaitable[T]) -> T:
    from opentelemetry.context import attach, detach
    from opentelemetry.trace import Status, StatusCode

    ours, theirs = call_context.set(context), attach(context)
    try:
        response = await answering
    except BaseException as error:
        log_errors(end_span)(span, error)
        raise
    finally:
        detach(theirs)
        call_context.reset(ours)
    span.set_attribute("http.response.status_code", response.status_code)
    if response.status_code >= 500:
        span.set_attribute("error.type", str(response.status_code))
        span.set_status(Status(StatusCode.ERROR, f"status {response.status_code}"))
    log_errors(end_span)(span)
    return response
