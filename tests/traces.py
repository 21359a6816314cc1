"""Spans in memory, for tests: what was traced, and what belongs to what."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Tracer

from tinkex.observability import tracing


class Traces:
    """The spans that have ended, in the order in which they did."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    @property
    def program(self) -> Tracer:
        """What the user's own program makes its spans with."""
        return self.provider.get_tracer("program")

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        return self._exporter.get_finished_spans()

    @property
    def names(self) -> list[str]:
        return [span.name for span in self.spans]

    def all(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        found = self.all(name)
        assert len(found) == 1, f"{len(found)} spans are named {name}; there are {self.names}"
        return found[0]

    def inside(self, outer: ReadableSpan) -> list[ReadableSpan]:
        """The children of a span, oldest first."""
        found = [s for s in self.spans if s.parent is not None and s.parent.span_id == outer.context.span_id]
        return sorted(found, key=lambda span: span.start_time or 0)

    def trace_of(self, name: str) -> int:
        return self.one(name).context.trace_id

    def text(self) -> str:
        """Everything that would leave the process."""
        return "\n".join(span.to_json() for span in self.spans)

    def clear(self) -> None:
        self._exporter.clear()


@contextmanager
def traced() -> Iterator[Traces]:
    """Traces what happens in the block."""
    traces = Traces()
    tracing.use_provider(traces.provider)
    try:
        yield traces
    finally:
        tracing.use_provider(None)
        traces.provider.shutdown()
