"""Spans of an accepted operation: how long it waited, and its run, in the trace of the call that submitted it.

They are made around the work, by whoever queues it and takes it: what computes it knows nothing of them. They are not part of
what is recorded, so an operation that a restart puts back in line is traced no further.
"""

from __future__ import annotations

import contextvars
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tinkex.engine.scheduler import Work
from tinkex.engine.store import FutureStatus, Outcome
from tinkex.observability.tracing import find_tracer, harmless

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span

call_context: contextvars.ContextVar[Context | None] = contextvars.ContextVar("tinkex_call", default=None)
"""The trace of the call that is being served, where it is traced."""


@dataclass
class _Shared:
    """A pass that several operations share."""

    span: Span
    num_running: int


@dataclass
class _Traced:
    """One operation on its way."""

    context: Context
    span: Span
    """Of its wait, then of its run."""
    runs: bool = False
    shared: _Shared | None = field(default=None)


class OperationSpans:
    """The spans of all operations that have no outcome yet; those whose call is not traced have none.

    Operations are queued by any thread, and started and ended by the engine's.
    """

    def __init__(self) -> None:
        self._traced: dict[str, _Traced] = {}

    @property
    def num_open(self) -> int:
        """How many operations have a span that has not ended."""
        return len(self._traced)

    @harmless
    def queued(self, work: Work[Any]) -> None:
        """Note that the call that is being served has put an operation in line; before anybody can take it."""
        context = call_context.get()
        if context is None:
            return
        tracer = find_tracer()
        if tracer is not None:
            span = tracer.start_span("tinkex.queue", context, attributes=_facts(work))
            self._traced[work.request_id] = _Traced(context, span)

    @harmless
    def started(self, works: Sequence[Work[Any]]) -> None:
        """Note that operations begin to run, those of one pass together."""
        tracer = find_tracer() if self._traced else None
        if tracer is None:
            return
        from opentelemetry.context import Context
        from opentelemetry.trace import Link, get_current_span

        waited = [(w, self._traced[w.request_id]) for w in works if w.request_id in self._traced]
        if not waited:
            return
        facts = {
            "tinkex.batch.num_operations": len(works),
            "tinkex.batch.num_tokens": sum(work.num_tokens for work in works),
        }
        shared, links = None, None
        if len(works) > 1:
            # It belongs to nobody's trace alone, so it is one of its own, and they point to each other.
            members = [Link(get_current_span(each.context).get_span_context()) for _, each in waited]
            span = tracer.start_span("tinkex.engine.pass", Context(), links=members, attributes=facts)
            shared, links = _Shared(span, len(waited)), [Link(span.get_span_context())]
        for work, each in waited:
            each.span.end()
            each.runs, each.shared = True, shared
            each.span = tracer.start_span(
                f"tinkex.engine.{work.kind.value}",
                each.context,
                links=links,
                attributes={**_facts(work), **facts},
            )

    @harmless
    def ended(self, outcomes: Iterable[tuple[str, Outcome]]) -> None:
        """Note how operations ended, those too that never ran."""
        if not self._traced:
            return
        for request_id, outcome in outcomes:
            each = self._traced.pop(request_id, None)
            if each is not None:
                _end(each, outcome)

    @harmless
    def abandon(self) -> None:
        """End the spans of operations that are left as they are, because the engine stops."""
        while self._traced:
            _, each = self._traced.popitem()
            each.span.set_attributes({"tinkex.ran": each.runs, "tinkex.unfinished": True})
            _close(each)


def _end(each: _Traced, outcome: Outcome) -> None:
    from opentelemetry.trace import Status, StatusCode

    each.span.set_attributes({"tinkex.ran": each.runs, "tinkex.result_bytes": len(outcome.result)})
    if outcome.status is not FutureStatus.DONE:
        # The text of an error may quote what the user sent, so only its category is told.
        each.span.set_attribute("error.type", outcome.category or "unknown")
        each.span.set_status(Status(StatusCode.ERROR, outcome.category or "unknown"))
    _close(each)


def _close(each: _Traced) -> None:
    each.span.end()
    if each.shared is not None:
        each.shared.num_running -= 1
        if each.shared.num_running == 0:
            each.shared.span.end()


def _facts(work: Work[Any]) -> dict[str, str | int]:
    return {
        "tinkex.operation": work.kind.value,
        "tinkex.request_id": work.request_id,
        "tinkex.model_id": work.run_id,
        "tinkex.seq_id": work.seq_id,
        "tinkex.num_tokens": work.num_tokens,
    }
