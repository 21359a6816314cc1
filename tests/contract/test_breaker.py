"""The circuit breaker on a server that really dies and comes back; the engine in this process has none."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tinkex
from tests.contract.backends import BASE_MODEL, Backend
from tests.contract.test_metrics import counted
from tests.contract.test_training import datum
from tests.durability.killable import KillableServer
from tinkex import circuit_breakers, types
from tinkex._transport.breaker import DEFAULTS
from tinkex.observability.events import CircuitChanged, Event, NullSink
from tinkex.observability.metrics import MetricsSink
from tinkex.testing import local_engine

FAILURE_THRESHOLD = DEFAULTS.failure_threshold


def open_breakers(sink: MetricsSink) -> float:
    """How many breakers are not closed: a request on a connection that was just lost counts for its endpoint only."""
    gauges = sink.metrics.snapshot().gauges
    return sum(value for series, value in gauges.items() if series.startswith("tinkex_circuit_open"))


class RecordingSink:
    def __init__(self) -> None:
        self.changes: list[tuple[str, str]] = []

    def emit(self, event: Event) -> None:
        if isinstance(event, CircuitChanged):
            self.changes.append((event.endpoint, event.state))


@pytest.fixture
def killable(tiny_model: Path, tmp_path: Path) -> Iterator[KillableServer]:
    with KillableServer(tmp_path, tiny_model) as server:
        yield server


def rest_of(server: KillableServer, sink: Any, **settings: Any) -> tinkex.RestClient:
    config = tinkex.Config(base_url=server.url, api_key=server.key, max_retries=0, **settings)
    return tinkex.RestClient(config=config, events=sink)


def ask(rest: tinkex.RestClient) -> str:
    """Requests the health once; returns the outcome."""
    try:
        return rest.get_health().result(timeout=60).status
    except tinkex.CircuitOpenError:
        return "not sent"
    except tinkex.APIConnectionError:
        return "no answer"
    except tinkex.APIStatusError as error:
        return f"status {error.status_code}"


def find_again(rest: tinkex.RestClient) -> None:
    """Asks until an answer comes, as often as the breaker allows."""
    deadline = time.monotonic() + 180
    while ask(rest) != "ok":
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.slow
def test_the_circuit_opens_when_a_server_exits_and_closes_when_it_is_back(
    killable: KillableServer,
) -> None:
    recorder = RecordingSink()
    sink = MetricsSink(then=recorder)
    rest, other = rest_of(killable, sink), rest_of(killable, NullSink())
    unprotected = rest_of(killable, NullSink(), circuit_breaker=False)
    assert ask(rest) == "ok"
    with tinkex.ServiceClient(base_url=killable.url, api_key=killable.key, events=NullSink()) as service:
        training = service.create_lora_training_client(BASE_MODEL, rank=2, seed=1)
        before = training.forward_backward([datum(4)], "cross_entropy").result(timeout=120)
        killable.kill()
        assert [ask(rest) for _ in range(FAILURE_THRESHOLD)] == ["no answer"] * FAILURE_THRESHOLD
        assert open_breakers(sink) == 1
        sent = counted(sink, "healthz", "error")
        outcomes = [ask(rest) for _ in range(20)]
        assert "not sent" in outcomes
        assert counted(sink, "healthz", "error") - sent == outcomes.count("no answer"), (
            "nothing else went out"
        )
        knows = [ask(other) for _ in range(5)]
        assert "not sent" in knows, "what one client knows, all of the process know"
        assert [ask(unprotected) for _ in range(5)] == ["no answer"] * 5, "switched off, it always sends"
        assert {each.state for each in circuit_breakers.states(killable.url)} > {"closed"}
        with pytest.raises(tinkex.APIConnectionError) as caught:
            rest.get_health().result(timeout=60)
        if isinstance(
            caught.value, tinkex.CircuitOpenError
        ):  # else it was the one that tries, on a slow machine
            assert "failing" in str(caught.value)
            assert 0 <= caught.value.retry_after_s <= DEFAULTS.cooldown_s
        again = training.forward_backward([datum(4)], "cross_entropy")  # goes its own way, with retries above
        killable.start()
        find_again(rest)
        assert recorder.changes[0][1] == "open"
        assert recorder.changes[-1][1] == "closed"
        assert open_breakers(sink) == 0
        assert ask(other) == "ok"
        assert again.result(timeout=180).metrics["loss:sum"] == before.metrics["loss:sum"]


@pytest.mark.slow
def test_of_many_threads_that_wait_for_an_unreachable_server_one_at_a_time_tries_it(
    killable: KillableServer,
) -> None:
    recorder = RecordingSink()
    sink = MetricsSink(then=recorder)
    rest = rest_of(killable, sink)
    killable.kill()
    assert {ask(rest) for _ in range(FAILURE_THRESHOLD)} == {"no answer"}
    deadline = time.monotonic() + 60
    while circuit_breakers.state(killable.url) != "half_open":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    sent = counted(sink, "healthz", "error")
    start = threading.Barrier(12)
    outcomes: list[str] = []

    def knock() -> None:
        start.wait()
        outcomes.append(ask(rest))

    threads = [threading.Thread(target=knock) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tried = outcomes.count("no answer")
    assert (tried, outcomes.count("not sent")) == (1, 11)
    assert counted(sink, "healthz", "error") == sent + tried
    assert recorder.changes[-1] == ("connection", "open")


@pytest.mark.backends("embedded")
def test_the_engine_in_this_process_has_no_breaker_and_needs_none(backend: Backend) -> None:
    recorder = RecordingSink()
    config = tinkex.Config(base_url="local", circuit_breaker=True)
    with backend.service(base_url=None, config=config, events=recorder) as service:
        rest = service.create_rest_client()
        for _ in range(3 * FAILURE_THRESHOLD):
            with pytest.raises(tinkex.NotFoundError):
                rest.get_training_run("no-such-run").result(timeout=60)
        sampler = service.create_sampling_client(base_model=BASE_MODEL)
        sampler.sample(types.ModelInput.from_ints([5]), 1, types.SamplingParams(max_tokens=1)).result(
            timeout=60
        )
    assert recorder.changes == []
    assert all(each.base_url.startswith("http") for each in circuit_breakers.states())


def test_a_closed_embedded_engine_always_raises_the_same_error(tiny_model: Path) -> None:
    recorder = RecordingSink()
    with local_engine(tiny_model) as engine:
        service = engine.service(events=recorder)
        service.get_server_capabilities()
        engine.close()
        for _ in range(3 * FAILURE_THRESHOLD):
            with pytest.raises(tinkex.ClosedError):
                service.get_server_capabilities()
    assert recorder.changes == []
