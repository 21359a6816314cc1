from __future__ import annotations

import math
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.exposition import read_exposition
from tests.scripted import ScriptedServer
from tinkex.clients.service import ServiceClient
from tinkex.observability.events import (
    CircuitChanged,
    Event,
    NullSink,
    QueueStateChanged,
    RequestFinished,
    RetryScheduled,
)
from tinkex.observability.metrics import MAX_SERIES, WINDOW, Metrics, MetricsSink


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300))
def test_percentiles_are_the_nearest_ranks(values: list[float]) -> None:
    metrics = Metrics()
    for value in values:
        metrics.observe("x", value)
    got = metrics.snapshot().histograms["x"]
    ordered = sorted(values)
    assert (got.count, got.min, got.max) == (len(values), ordered[0], ordered[-1])
    assert got.p95 == ordered[-(-len(values) * 95 // 100) - 1]
    assert got.p99 >= got.p95 >= got.p50
    assert got.mean == pytest.approx(sum(values) / len(values), abs=1e-6)


def test_percentiles_follow_the_newest_values_and_the_median_lies_between_two() -> None:
    metrics = Metrics()
    for value in [1e9] * 10 + list(range(WINDOW)):
        metrics.observe("x", value)
    got = metrics.snapshot().histograms["x"]
    assert (got.count, got.max, got.p50, got.p95, got.p99) == (WINDOW + 10, 1e9, 499.5, 949.0, 989.0)


def test_counters_add_up_from_many_threads_and_reset_forgets() -> None:
    metrics = Metrics()
    threads = [
        threading.Thread(target=lambda: [metrics.increment("n", kind="a") for _ in range(1000)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert metrics.snapshot().counters == {'n{kind="a"}': 4000.0}
    metrics.reset()
    assert metrics.snapshot().counters == {}


def test_labels_that_vary_without_end_cost_no_memory() -> None:
    metrics = Metrics()
    for number in range(MAX_SERIES + 50):
        metrics.increment("n", request=str(number))
    metrics.increment("n", request="0")
    snapshot = metrics.snapshot()
    assert (len(snapshot.counters), snapshot.dropped_series) == (MAX_SERIES, 50)
    assert snapshot.counters['n{request="0"}'] == 2.0


def test_the_text_for_prometheus_is_exact() -> None:
    metrics = Metrics()
    metrics.increment("calls_total", 2, path='a"b')
    metrics.set_gauge("depth", 1.5)
    metrics.observe("ms", 3.0, endpoint="x")
    lines = metrics.prometheus().splitlines()
    assert lines[:4] == [
        "# TYPE calls_total counter",
        r'calls_total{path="a\"b"} 2',
        "# TYPE depth gauge",
        "depth 1.5",
    ]
    assert lines[4] == "# TYPE ms histogram"
    assert 'ms_bucket{endpoint="x",le="2"} 0' in lines
    assert 'ms_bucket{endpoint="x",le="5"} 1' in lines
    assert lines[-3:] == [
        'ms_bucket{endpoint="x",le="+Inf"} 1',
        'ms_sum{endpoint="x"} 3',
        'ms_count{endpoint="x"} 1',
    ]


def test_a_client_feeds_them_and_the_next_sink_receives_every_event_too() -> None:
    received: list[Event] = []

    class RecordingSink:
        def emit(self, event: Event) -> None:
            received.append(event)

    sink = MetricsSink(then=RecordingSink())
    with ServiceClient(transport=ScriptedServer().transport, events=sink) as service:
        service.get_server_capabilities()
    sink.emit(RetryScheduled("asample", 0, 0.5, "down"))
    sink.emit(QueueStateChanged("r", "Sample", "paused_capacity", None))
    sink.emit(CircuitChanged("http://x", "train", "open", "down", "optim_step"))
    sink.emit(CircuitChanged("http://x", "train", "half_open", "probing", "optim_step"))
    got = sink.metrics.snapshot()
    assert got.counters['tinkex_requests_total{endpoint="get_server_capabilities",outcome="ok"}'] == 1
    assert got.histograms['tinkex_request_duration_ms{endpoint="get_server_capabilities"}'].count == 1
    assert got.counters['tinkex_retries_total{endpoint="asample"}'] == 1
    assert got.counters['tinkex_queue_state_changes_total{state="paused_capacity"}'] == 1
    assert got.gauges == {'tinkex_circuit_open{endpoint="optim_step"}': 1.0}
    assert len(received) > 4


def test_no_answer_and_an_error_count_as_failures_and_a_redirect_does_not() -> None:
    sink = MetricsSink(then=NullSink())
    for status in (200, 302, 404, 500, None):
        sink.emit(RequestFinished("checkpoint_archive", 0, status, 0.001))
    counters = sink.metrics.snapshot().counters
    assert counters['tinkex_requests_total{endpoint="checkpoint_archive",outcome="ok"}'] == 2
    assert counters['tinkex_requests_total{endpoint="checkpoint_archive",outcome="error"}'] == 3


def test_a_long_poll_that_ends_without_a_result_is_no_failure() -> None:
    sink = MetricsSink(then=NullSink())
    for status in (408, 408, 200, 500):
        sink.emit(RequestFinished("retrieve_future", 0, status, 0.1))
    sink.emit(RequestFinished("retrieve_futures", 0, 408, 0.1))
    sink.emit(RequestFinished("healthz", 0, 408, 0.1))
    counters = sink.metrics.snapshot().counters
    assert counters['tinkex_requests_total{endpoint="retrieve_future",outcome="ok"}'] == 3
    assert counters['tinkex_requests_total{endpoint="retrieve_future",outcome="error"}'] == 1
    assert counters['tinkex_requests_total{endpoint="retrieve_futures",outcome="ok"}'] == 1
    assert counters['tinkex_requests_total{endpoint="healthz",outcome="error"}'] == 1


def test_what_is_not_a_number_is_written_as_prometheus_reads_it() -> None:
    metrics = Metrics()
    metrics.set_gauge("loss", math.nan)
    metrics.set_gauge("best", math.inf)
    metrics.set_gauge("worst", -math.inf)
    assert {"loss NaN", "best +Inf", "worst -Inf"} <= set(metrics.prometheus().splitlines())


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (lambda m: m.increment("steps", -1.0), "cannot be incremented by"),
        (lambda m: m.increment("steps", math.nan), "cannot be incremented by"),
        (lambda m: m.increment("my steps"), "is not a valid metric name"),
        (lambda m: m.increment("steps", **{"a-b": "c"}), "is not a valid metric name"),
        (lambda m: m.observe("ms", 1.0, le="5"), "is reserved"),
        (lambda m: (m.increment("steps"), m.set_gauge("steps", 1.0)), "is already a counter"),
        (lambda m: m.observe("tinkex_requests_total", 1.0), "is already a counter"),
    ],
    ids=["falls", "no number", "name", "label", "le", "two kinds", "ours"],
)
def test_what_would_spoil_the_page_is_rejected_where_it_is_recorded(record: Any, said: str) -> None:
    metrics = Metrics()
    with pytest.raises(ValueError, match=said):
        record(metrics)
    metrics.observe("ms", 1.0)
    assert read_exposition(metrics.prometheus())["ms_count"] == 1
