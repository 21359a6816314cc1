"""Telemetry reports reach a server, which counts them; none are sent to an embedded engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest

import tinkex
from tests.contract.backends import BASE_MODEL, WITH_A_MODEL, Backend
from tests.contract.test_metrics import counted, metrics_of
from tests.servers import ServedEngine
from tinkex import types
from tinkex.observability import telemetry
from tinkex.observability.events import HeartbeatLost, NullSink
from tinkex.observability.metrics import MetricsSink
from tinkex.observability.telemetry import Reporter

PROMPT = types.ModelInput.from_ints([5, 6, 7])


def reports(server: ServedEngine) -> Callable[[str, str], float]:
    """How many reports of a kind and severity the server has counted since now."""
    before = metrics_of(server)

    def grown(event: str, severity: str) -> float:
        series = f'tinkex_client_reports_total{{event="{event}",severity="{severity}"}}'
        return metrics_of(server).get(series, 0.0) - before.get(series, 0.0)

    return grown


def service_of(server: ServedEngine, sink: MetricsSink, **settings: Any) -> tinkex.ServiceClient:
    config = tinkex.Config(base_url=server.url, api_key=server.key, **settings)
    service = tinkex.ServiceClient(config=config, events=sink)
    service.holder.get_session_id()  # reports belong to a session
    return service


def reporter_of(service: tinkex.ServiceClient) -> Reporter:
    reporter = service.get_telemetry()
    assert reporter is not None
    return reporter


@pytest.fixture
def sink() -> MetricsSink:
    return MetricsSink(then=NullSink())


def test_reports_arrive_at_a_server_and_are_found_there(
    served_engine: ServedEngine, sink: MetricsSink
) -> None:
    grown = reports(served_engine)
    with service_of(served_engine, sink, telemetry=True) as service:
        training = service.create_lora_training_client(BASE_MODEL, rank=2, seed=1)

        @telemetry.capture(training)
        def divide() -> float:
            return 1 / 0

        @telemetry.capture(service)
        async def ask() -> None:
            await service.create_rest_client().get_training_run_async("no-such-run")

        with pytest.raises(ZeroDivisionError):
            divide()
        with pytest.raises(tinkex.NotFoundError):
            asyncio.run(ask())
        reporter = reporter_of(service)
        assert reporter.log("warmup_done", {"duration_s": 3.2}, severity="DEBUG")
        assert reporter.wait_until_drained(60)
        assert grown("SESSION_START", "INFO") == 1
        assert grown("UNHANDLED_EXCEPTION", "ERROR") == 1
        assert grown("GENERIC_EVENT", "WARNING") == 2, "an error of the user's, and its request"
        assert grown("GENERIC_EVENT", "DEBUG") == 1
        assert grown("SESSION_END", "INFO") == 0
        assert reporter.num_dropped == 0
    assert grown("SESSION_END", "INFO") == 1
    assert counted(sink, "telemetry") >= 2


def test_what_happens_to_a_client_is_reported_by_itself(
    served_engine: ServedEngine, sink: MetricsSink
) -> None:
    grown = reports(served_engine)
    with service_of(served_engine, sink, telemetry=True) as service:
        service.holder.caller.sink.emit(HeartbeatLost("a session", 130.0))
        assert reporter_of(service).wait_until_drained(60)
        assert grown("GENERIC_EVENT", "INFO") == 1


def test_a_fatal_exception_reaches_the_server_without_blocking_the_program(
    served_engine: ServedEngine, sink: MetricsSink
) -> None:
    grown = reports(served_engine)
    with service_of(served_engine, sink, telemetry=True) as service:
        with pytest.raises(RuntimeError, match="mine"), telemetry.capture(service, fatal=True):
            raise RuntimeError("mine")
        deadline = time.monotonic() + 60
        while grown("UNHANDLED_EXCEPTION", "CRITICAL") < 1:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_disabled_telemetry_sends_nothing(served_engine: ServedEngine, sink: MetricsSink) -> None:
    with service_of(served_engine, sink, telemetry=False) as service:
        assert service.get_telemetry() is None
        with pytest.raises(ZeroDivisionError), telemetry.capture(service, fatal=True):
            raise ZeroDivisionError
    assert counted(sink, "telemetry") == counted(sink, "telemetry", "error") == 0


@pytest.mark.backends("embedded")
def test_no_telemetry_is_sent_to_an_embedded_engine(backend: Backend, sink: MetricsSink) -> None:
    config = tinkex.Config(base_url="local", telemetry=True)
    with backend.service(base_url=None, config=config, events=sink) as service:
        training = service.create_lora_training_client(BASE_MODEL, rank=2, seed=1)
        sampler = training.save_weights_and_get_sampling_client()
        for client in (service, training, sampler):
            assert client.get_telemetry() is None
            with pytest.raises(ZeroDivisionError), telemetry.capture(client, fatal=True):
                raise ZeroDivisionError
        sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=1)).result(timeout=60)
    assert counted(sink, "telemetry") == counted(sink, "telemetry", "error") == 0


@pytest.mark.backends(*WITH_A_MODEL)
def test_a_report_is_taken_unread_and_what_is_in_it_is_shown_nowhere(
    backend: Backend, served_engine: ServedEngine
) -> None:
    """Reports of other clients may contain secrets: an engine counts them and discards the content."""
    from tinkex._runtime import background
    from tinkex._wire.endpoints import endpoint

    secret = "tml-secret-of-somebody"
    strange: list[Any] = [
        {"event": secret, "severity": secret},
        {"event": "GENERIC_EVENT", "severity": "INFO", "event_name": secret},
        secret,
        None,
    ]
    request = types.TelemetrySendRequest(events=strange)
    with backend.service() as service:
        answer = background().run(service.holder.caller.call(endpoint("telemetry"), request))
    assert answer.status == "accepted"
    page: Mapping[str, float] = metrics_of(served_engine)
    assert not [series for series in page if secret in series]
