"""Sinks of the whole process: loggers and metrics that are attached and detached while clients work."""

from __future__ import annotations

import logging
import queue
from collections.abc import Iterator

import pytest

import tinkex
from tests.recording import Recorder
from tests.scripted import ScriptedServer
from tinkex import types
from tinkex.losses.regularizers import L1, Pipeline
from tinkex.observability import process
from tinkex.observability.events import (
    CustomLossStarted,
    Event,
    RegularizerFinished,
    RegularizerStarted,
    RequestFinished,
    RequestStarted,
    RetryScheduled,
)
from tinkex.testing import MockTransport, reply


def client() -> tinkex.RestClient:
    transport = MockTransport(lambda request: reply({"status": "ok"}))
    return tinkex.RestClient(base_url="http://mock", api_key="tml-test", transport=transport)


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    sink = Recorder()
    yield sink
    process.detach(sink)


def finished(events: list[Event]) -> int:
    return sum(isinstance(event, RequestFinished) for event in events)


def test_a_sink_receives_the_events_of_all_clients_while_it_is_attached(recorder: Recorder) -> None:
    first, second = client(), client()
    assert process.attach(recorder) is recorder
    first.get_health().result()
    second.get_health().result()
    assert process.detach(recorder) is True
    first.get_health().result()
    assert finished(recorder.events) == 2
    assert process.detach(recorder) is False


def test_a_sink_may_detach_itself() -> None:
    detached = queue.SimpleQueue[bool]()

    class Once:
        def emit(self, event: Event) -> None:
            detached.put(process.detach(self))

    once = Once()
    process.attach(once)
    client().get_health().result()
    assert detached.get(timeout=30) is True
    assert process.detach(once) is False


def test_a_sink_is_attached_once_and_must_be_one(recorder: Recorder) -> None:
    process.attach(recorder)
    with pytest.raises(ValueError, match="attached already"):
        process.attach(recorder)
    with pytest.raises(TypeError, match="emit"):
        process.attach(object())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "shown", "hidden"),
    [
        ({}, ["RequestStarted endpoint='healthz' attempt=0", "RequestFinished endpoint='healthz'"], []),
        ({"events": [RequestFinished]}, ["RequestFinished endpoint='healthz'"], ["RequestStarted"]),
        ({"level": "debug"}, [], ["RequestFinished"]),
        ({"level": logging.WARNING, "events": (RequestStarted,)}, ["RequestStarted"], ["RequestFinished"]),
    ],
)
def test_a_logger_is_attached_and_detached_at_run_time(
    options: dict[str, object], shown: list[str], hidden: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    rest = client()
    with caplog.at_level(logging.INFO, "tinkex.events"):
        handle = process.attach_logger(**options)  # type: ignore[arg-type]
        rest.get_health().result()
        assert process.detach(handle)
        lines = len(caplog.messages)
        rest.get_health().result()
    assert len(caplog.messages) == lines
    text = "\n".join(caplog.messages)
    assert all(one in text for one in shown)
    assert not any(one in text for one in hidden)


@pytest.mark.parametrize(
    ("options", "error"), [({"level": "loud"}, ValueError), ({"events": ["RequestFinished"]}, TypeError)]
)
def test_a_logger_with_wrong_options_is_rejected(options: dict[str, object], error: type[Exception]) -> None:
    with pytest.raises(error):
        process.attach_logger(**options)  # type: ignore[arg-type]


def test_the_metrics_of_the_process_count_all_clients() -> None:
    metrics = process.metrics()
    series = 'tinkex_requests_total{endpoint="healthz",outcome="ok"}'
    before = metrics.snapshot().counters.get(series, 0.0)
    client().get_health().result()
    client().get_health().result()
    assert process.metrics() is metrics
    assert metrics.snapshot().counters[series] == before + 2


@pytest.mark.slow
def test_a_sink_receives_the_events_of_retries_and_regularizers_too(recorder: Recorder) -> None:
    process.attach(recorder)
    failures = [tinkex.APIConnectionError()]

    def step() -> str:
        if failures:
            raise failures.pop()
        return "done"

    fast = tinkex.RetryConfig(retry_delay_base=0.001, retry_delay_max=0.002)
    assert tinkex.with_retry(step, fast) == "done"
    datum = types.Datum(types.ModelInput.from_ints([1]), {"target_tokens": [2]})
    penalty = Pipeline([types.RegularizerSpec(L1(), weight=1.0)])
    penalty.evaluate([datum], [[-2.0]], lambda data, logprobs: (-logprobs[0].sum(), {}))
    process.detach(recorder)
    assert [type(event) for event in recorder.events] == [
        RetryScheduled,
        RegularizerStarted,
        RegularizerFinished,
    ]


@pytest.mark.slow
def test_the_events_of_a_custom_loss_arrive_once(recorder: Recorder) -> None:
    process.attach(recorder)
    datum = types.Datum(types.ModelInput.from_ints([1]), {"target_tokens": [2]})
    with tinkex.ServiceClient(transport=ScriptedServer().transport) as service:
        training = service.create_lora_training_client("toy", rank=2)
        terms = [types.RegularizerSpec(L1(), weight=1.0)]
        training.forward_backward_custom(
            [datum], lambda data, logprobs: (-logprobs[0].sum(), {}), regularizers=terms
        ).result(timeout=30)
    process.detach(recorder)
    kinds = [type(event) for event in recorder.events]
    assert [kinds.count(kind) for kind in (CustomLossStarted, RegularizerStarted, RegularizerFinished)] == [
        1,
        1,
        1,
    ]
