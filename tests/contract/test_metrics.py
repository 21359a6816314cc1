"""Metrics of real work: every request is counted and timed, on the engine in this process and on a server."""

from __future__ import annotations

import math
import urllib.request
from collections.abc import Mapping

import pytest

import tinkex
from tests.contract.backends import BASE_MODEL, WITH_A_MODEL, Backend
from tests.contract.test_training import datum
from tests.exposition import read_exposition
from tests.servers import ServedEngine
from tinkex import types
from tinkex.observability.events import NullSink
from tinkex.observability.metrics import MetricsSink

pytestmark = pytest.mark.backends(*WITH_A_MODEL)

PROMPT = types.ModelInput.from_ints([5, 6, 7])
PARAMS = types.SamplingParams(max_tokens=3)


def counted(sink: MetricsSink, endpoint: str, outcome: str = "ok") -> float:
    series = f'tinkex_requests_total{{endpoint="{endpoint}",outcome="{outcome}"}}'
    return sink.metrics.snapshot().counters.get(series, 0.0)


def work(service: tinkex.ServiceClient) -> None:
    """Three steps, two samples, and a rejected request."""
    training = service.create_lora_training_client(BASE_MODEL, rank=2, seed=1)
    for _ in range(3):
        training.forward_backward([datum(4)], "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=1e-3)).result(timeout=60)
    sampler = training.save_weights_and_get_sampling_client()
    for _ in range(2):
        sampler.sample(PROMPT, 1, PARAMS).result(timeout=60)
    with pytest.raises(tinkex.NotFoundError):
        service.create_rest_client().get_training_run("no-such-run").result(timeout=60)


@pytest.fixture
def sink() -> MetricsSink:
    return MetricsSink(then=NullSink())


def test_what_a_client_does_is_counted_and_timed(backend: Backend, sink: MetricsSink) -> None:
    with backend.service(events=sink) as service:
        work(service)
    assert counted(sink, "create_session") == 1
    assert counted(sink, "create_model") == 1
    assert counted(sink, "forward_backward") == 3
    assert counted(sink, "optim_step") == 3
    assert counted(sink, "asample") == 2
    assert counted(sink, "finish_session") == 1
    assert counted(sink, "get_training_run", "error") == 1
    assert counted(sink, "get_training_run") == 0
    snapshot = sink.metrics.snapshot()
    for endpoint in ("forward_backward", "optim_step", "asample"):
        took = snapshot.histograms[f'tinkex_request_duration_ms{{endpoint="{endpoint}"}}']
        assert took.count == counted(sink, endpoint)
        assert 0 < took.min <= took.p50 <= took.p95 <= took.p99 <= took.max
        assert took.min <= took.mean <= took.max
    assert snapshot.counters['tinkex_events_total{event="SessionOpened"}'] == 1
    assert snapshot.counters['tinkex_events_total{event="SessionClosed"}'] == 1
    assert snapshot.dropped_series == 0


def test_the_prometheus_text_has_the_same_values(backend: Backend, sink: MetricsSink) -> None:
    with backend.service(events=sink) as service:
        work(service)
        sink.metrics.increment("my_steps_total", 3, phase="warmup")
        sink.metrics.set_gauge("my_loss", float("nan"))
    page = read_exposition(sink.metrics.prometheus())
    snapshot = sink.metrics.snapshot()
    assert {name: page[name] for name in snapshot.counters} == snapshot.counters
    assert page['my_steps_total{phase="warmup"}'] == 3
    assert math.isnan(page["my_loss"])
    labels = 'endpoint="optim_step"'
    took = snapshot.histograms[f"tinkex_request_duration_ms{{{labels}}}"]
    assert page[f"tinkex_request_duration_ms_count{{{labels}}}"] == took.count == 3
    assert page[f'tinkex_request_duration_ms_bucket{{{labels},le="+Inf"}}'] == 3
    buckets = [
        value
        for name, value in page.items()
        if name.startswith("tinkex_request_duration_ms_bucket{" + labels)
    ]
    assert buckets == sorted(buckets)
    sink.metrics.reset()
    assert sink.metrics.prometheus() == ""


def test_two_clients_of_one_sink_add_up(backend: Backend, sink: MetricsSink) -> None:
    with backend.service(events=sink) as first, backend.service(events=sink) as second:
        for service in (first, second):
            service.get_server_capabilities()
    assert counted(sink, "get_server_capabilities") == 2


@pytest.mark.backends("server")
def test_client_and_server_count_the_same_calls(
    backend: Backend, sink: MetricsSink, served_engine: ServedEngine
) -> None:
    before = metrics_of(served_engine)
    with backend.service(events=sink) as service:
        work(service)
    after = metrics_of(served_engine)
    for endpoint in ("forward_backward", "optim_step", "asample", "create_model"):
        series = f'tinkex_requests_total{{endpoint="{endpoint}",status="200"}}'
        assert after[series] - before.get(series, 0.0) == counted(sink, endpoint)


def metrics_of(server: ServedEngine) -> Mapping[str, float]:
    """The server's metrics."""
    request = urllib.request.Request(f"{server.url}/metrics", headers={"X-API-Key": server.key})
    with urllib.request.urlopen(request, timeout=60) as response:
        return read_exposition(response.read().decode())
