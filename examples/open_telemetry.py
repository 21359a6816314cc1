"""Trace one training step from your code to the optimizer with OpenTelemetry.

You will see a line per finished span from the console exporter: your program, the client's operations, each
request, and the queueing and execution of each operation in the engine, all with one trace id; then this one
trace as a tree. It needs: pip install 'tinkex[engine,otel]' opentelemetry-sdk. With a server, the tree ends at the
requests; if the server exports its spans too, a collector shows both sides as one trace.
"""

from __future__ import annotations

import os

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor

import tinkex
from tinkex import types

SPANS: list[ReadableSpan] = []


def line(span: ReadableSpan) -> str:
    """Formats a span as one line; the exporter's default is JSON with every attribute."""
    SPANS.append(span)
    duration_ms = (span.end_time - span.start_time) / 1e6
    return f"{span.context.trace_id:032x}  {duration_ms:8.1f} ms  {span.name}\n"


def tree(span: ReadableSpan, depth: int = 0) -> None:
    """Prints a span with some attributes, and its children."""
    attributes = sorted((span.attributes or {}).items())
    shown = {name: value for name, value in attributes if name.startswith("tinkex.num") or "status" in name}
    print(f"{'   ' * depth}{span.name}  {shown or ''}")
    children = [s for s in SPANS if s.parent is not None and s.parent.span_id == span.context.span_id]
    for child in sorted(children, key=lambda s: s.start_time):
        tree(child, depth + 1)


def train() -> float:
    """Trains one step and returns its loss; the client continues the trace of its caller."""
    base_url = os.environ.get("TINKER_BASE_URL") or "local"
    with tinkex.ServiceClient(base_url=base_url) as service:
        model = os.environ.get("TINKER_BASE_MODEL") or service.get_server_capabilities().model_names()[0]
        training = service.create_lora_training_client(model, rank=4)
        prompt = types.ModelInput.from_text("Traces lead from the loop to the step.", training)
        tokens = prompt.to_ints()
        datum = types.Datum(types.ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})
        with trace.get_tracer("example").start_as_current_span("my training step"):
            backward = training.forward_backward([datum], "cross_entropy")
            step = training.optim_step(types.AdamParams(learning_rate=1e-3))
            loss = backward.result().loss
            step.result()
    return loss


def main() -> None:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter(formatter=line)))
    trace.set_tracer_provider(provider)  # traces all clients, existing and new
    with trace.get_tracer("example").start_as_current_span("my program") as mine:
        loss = train()
    root = next(span for span in SPANS if span.context.span_id == mine.get_span_context().span_id)
    trace_ids = {span.context.trace_id for span in SPANS}
    print(f"\n{len(SPANS)} spans in {len(trace_ids)} trace, {root.context.trace_id:032x}:")
    tree(root)
    print("loss", round(loss, 3))


if __name__ == "__main__":
    main()
