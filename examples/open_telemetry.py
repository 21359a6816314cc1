"""Follow one training step from your own code to the optimizer, with OpenTelemetry.

You will see every span on a line as it ends, by the console exporter: your own step, the client's operations, each
request, the time each operation waited in the engine's queue, and its run. All of them have one trace id. Then the
same trace as a tree. It needs opentelemetry-sdk; against a server that exports its spans too, a collector shows
both sides as one trace, and here the tree ends at the requests.
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
    """A span on one line; what the exporter prints by itself is JSON with every attribute."""
    SPANS.append(span)
    took_ms = (span.end_time - span.start_time) / 1e6
    return f"{span.context.trace_id:032x}  {took_ms:8.1f} ms  {span.name}\n"


def tree(span: ReadableSpan, depth: int = 0) -> None:
    """Prints a span and what is inside of it, with what it says about itself."""
    told = dict(span.attributes or {})
    facts = {name: told[name] for name in sorted(told) if name.startswith("tinkex.num") or "status" in name}
    print(f"{'   ' * depth}{span.name}  {facts or ''}")
    inside = [s for s in SPANS if s.parent is not None and s.parent.span_id == span.context.span_id]
    for child in sorted(inside, key=lambda s: s.start_time):
        tree(child, depth + 1)


def main() -> None:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter(formatter=line)))
    trace.set_tracer_provider(provider)  # that is all: clients made before or after this are traced
    tracer = trace.get_tracer("example")

    base_url = os.environ.get("TINKER_BASE_URL") or "local"
    with tinkex.ServiceClient(base_url=base_url) as service:
        offered = service.get_server_capabilities().supported_models
        model = os.environ.get("TINKER_BASE_MODEL") or offered[0].model_name
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
