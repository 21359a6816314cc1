"""A missing trace collector and invalid trace headers do not affect a server."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest

import tinkex
from tests.contract.test_training import datum
from tests.faults.test_breaker import listening, nobody
from tests.servers import ServedEngine, serve
from tests.traces import traced
from tinkex import types

MODEL = "tiny/llama"


@pytest.mark.slow
@pytest.mark.parametrize("collector", [nobody, listening], ids=["unreachable", "silent"])
def test_a_failing_collector_delays_neither_work_nor_shutdown(
    collector: object, tiny_model: Path, tmp_path: Path
) -> None:
    assert callable(collector)
    with collector() as url:
        settings = {"OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_BSP_SCHEDULE_DELAY": "50"}
        # The server is given 30 s to stop, or the test fails there.
        with (
            serve(tmp_path, "--model", f"{MODEL}={tiny_model}", env=settings) as server,
            tinkex.ServiceClient(base_url=server.url, api_key=server.key) as service,
        ):
            training = service.create_lora_training_client(MODEL, rank=2, seed=1)
            losses = []
            for _ in range(5):
                passed = training.forward_backward([datum(4)], "cross_entropy")
                training.optim_step(types.AdamParams(learning_rate=1e-2)).result(timeout=60)
                losses.append(passed.result(timeout=60).metrics["loss:sum"])
            assert losses[-1] < losses[0]


HEADERS = {
    "no trace": {"traceparent": "nonsense"},
    "zeros": {"traceparent": f"00-{'0' * 32}-{'0' * 16}-01"},
    "a version of the future": {"traceparent": f"ff-{'a' * 32}-{'b' * 16}-01"},
    "a state without end": {
        "traceparent": f"00-{'a' * 32}-{'b' * 16}-01",
        "tracestate": ",".join(f"k{n}=v" for n in range(2000)),
    },
    "baggage that is none": {"baggage": "=;,;=" * 500},
    "bytes": {"traceparent": "00-\xff-\xfe-01"},
}


@pytest.mark.parametrize("name", HEADERS)
def test_invalid_trace_headers_do_not_change_the_response(name: str, served_engine: ServedEngine) -> None:
    request = urllib.request.Request(
        f"{served_engine.url}/api/v1/create_session",
        b"{}",
        {"X-API-Key": served_engine.key, "Content-Type": "application/json", **HEADERS[name]},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        assert json.loads(response.read())["session_id"]


def test_a_program_whose_exporter_raises_trains_normally(served_engine: ServedEngine) -> None:
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter

    class Broken(SpanExporter):
        def export(self, spans: object) -> object:  # type: ignore[override]
            raise RuntimeError("a mistake in somebody's exporter")

    class BrokenToo(SpanProcessor):
        def on_start(self, span: object, parent_context: object = None) -> None:
            raise RuntimeError("a mistake in somebody's processor")

    with traced() as traces:
        for processor in (SimpleSpanProcessor(Broken()), BrokenToo()):
            traces.provider.add_span_processor(processor)
        with tinkex.ServiceClient(base_url=served_engine.url, api_key=served_engine.key) as service:
            training = service.create_lora_training_client(MODEL, rank=2, seed=1)
            training.optim_step(types.AdamParams()).result(timeout=60)
            sampler = training.save_weights_and_get_sampling_client()
            prompt = types.ModelInput.from_ints([5, 6])
            assert (
                len(list(sampler.sample_stream(prompt, 1, types.SamplingParams(max_tokens=2, stop=[])))) == 3
            )
