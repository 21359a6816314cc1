"""Spans of an accepted operation: the time it waited and its run, in the trace of the call that submitted it.

They are not recorded, so an operation that is recovered after a restart is traced no further.
"""

from __future__ import annotations

import contextvars
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tinkex.engine.operation import Operation
from tinkex.engine.store import FutureStatus, Outcome
from tinkex.observability.tracing import find_tracer, log_errors

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span

call_context: contextvars.ContextVar[Context | None] = contextvars.ContextVar("tinkex_call", default=None)
"""The trace of the call that is being served, where it is traced."""


@dataclass
class _PassSpan:
    """The span of a pass that several operations share."""

    span: Span
    num_running: int


@dataclass
class _Trace:
    """The open span of one operation: of its wait, then of its run."""

    context: Context
    span: Span
    runs: bool = False
    shared: _PassSpan | None = field(default=None)


@log_errors
def queued(operation: Operation) -> None:
    """Start the span of an operation's wait; call it before the operation can start."""
    context = call_context.get()
    if context is None:
        return
    tracer = find_tracer()
    if tracer is not None:
        span = tracer.start_span("tinkex.queue", context, attributes=_attributes(operation))
        operation.trace = _Trace(context, span)


@log_errors
def started(operations: Sequence[Operation]) -> None:
    """Start the spans of operations that begin to run, those of one pass together."""
    traced = [operation for operation in operations if operation.trace is not None]
    tracer = find_tracer() if traced else None
    if tracer is None:
        return
    from opentelemetry.context import Context
    from opentelemetry.trace import Link, get_current_span

    batch = {
        "tinkex.batch.num_operations": len(operations),
        "tinkex.batch.num_tokens": sum(operation.num_tokens for operation in operations),
    }
    shared, links = None, None
    if len(operations) > 1:
        # A shared pass is in no single trace, so it has its own, and they link to each other.
        members = [Link(get_current_span(each.trace.context).get_span_context()) for each in traced]
        span = tracer.start_span("tinkex.engine.pass", Context(), links=members, attributes=batch)
        shared, links = _PassSpan(span, len(traced)), [Link(span.get_span_context())]
    for operation in traced:
        trace = operation.trace
        trace.span.end()
        trace.runs, trace.shared = True, shared
        trace.span = tracer.start_span(
            f"tinkex.engine.{operation.kind.value}",
            trace.context,
            links=links,
            attributes={**_attributes(operation), **batch},
        )


@log_errors
def ended(operations: Iterable[Operation]) -> None:
    """End the spans of operations that have an outcome, those too that never ran."""
    for operation in operations:
        trace, operation.trace = operation.trace, None
        if trace is not None and operation.outcome is not None:
            _end(trace, operation.outcome, operation.tokens_computed)


@log_errors
def abandoned(operations: Iterable[Operation]) -> None:
    """End the spans of operations that are left unfinished because the engine closes."""
    for operation in operations:
        trace, operation.trace = operation.trace, None
        if trace is not None:
            trace.span.set_attributes({"tinkex.ran": trace.runs, "tinkex.unfinished": True})
            _close(trace)


def _end(trace: _Trace, outcome: Outcome, tokens_computed: int) -> None:
    from opentelemetry.trace import Status, StatusCode

    trace.span.set_attributes(
        {
            "tinkex.ran": trace.runs,
            "tinkex.result_bytes": len(outcome.result),
            "tinkex.tokens_computed": tokens_computed,
        }
    )
    if outcome.status is not FutureStatus.DONE:
        # The text of an error may quote user input, so the span has its category only.
        trace.span.set_attribute("error.type", outcome.category or "unknown")
        trace.span.set_status(Status(StatusCode.ERROR, outcome.category or "unknown"))
    _close(trace)


def _close(trace: _Trace) -> None:
    trace.span.end()
    if trace.shared is not None:
        trace.shared.num_running -= 1
        if trace.shared.num_running == 0:
            trace.shared.span.end()


def _attributes(operation: Operation) -> dict[str, str | int]:
    return {
        "tinkex.operation": operation.kind.value,
        "tinkex.request_id": operation.request_id,
        "tinkex.model_id": operation.run_id,
        "tinkex.seq_id": operation.seq_id,
        "tinkex.num_tokens": operation.num_tokens,
    }
