"""Trace one training step from your code to the optimizer with OpenTelemetry.

You will see a line per finished span from the console exporter: your step, the client's operations, each HTTP
request, and the queueing and execution of each operation in the engine, all with one trace id; then the trace as a
tree. It needs opentelemetry-sdk. With a server, the tree ends at the requests; if the server exports its spans too,
a collector shows both sides as one trace.
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


def main() -> None:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter(formatter=line)))
    trace.set_tracer_provider(provider)  # traces all clients, existing and new
    tracer = trace.get_tracer("example")

    base_url = os.environ.get("TINKER_BASE_URL") or "local"
    with tinkex.ServiceClient(base_url=base_url) as service:
        models = service.get_server_capabilities().supported_models
        model = os.environ.get("TINKER_BASE_MODEL") or models[0].model_name
        training = service.create_lora_training_client(model, rank=4)
        tokens = training.get_tokenizer().encode("Traces lead from the loop to the step.")
        datum = types.Datum(
            model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs={"target_tokens": tokens[1:]}
        )
        with tracer.start_as_current_span("my training step") as mine:
            backward = training.forward_backward([datum], "cross_entropy")
            step = training.optim_step(types.AdamParams(learning_rate=1e-3))
            print("loss", round(backward.result().metrics["loss:sum"], 3))
            step.result()

    root = next(span for span in SPANS if span.context.span_id == mine.get_span_context().span_id)
    trace_ids = {span.context.trace_id for span in SPANS}
    print(f"\n{len(SPANS)} spans in {len(trace_ids)} traces; this one is {root.context.trace_id:032x}:")
    tree(root)


if __name__ == "__main__":
    main()
