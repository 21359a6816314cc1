"""The circuit breaker and failures without a status: DNS, certificates, servers that hang, cancelled calls."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import tinkex
from tests.faults.faulty_server import FaultyServer, fails_with, running
from tests.scripted import ScriptedServer
from tests.unit.transport.tls import certificates, secure
from tinkex import circuit_breakers
from tinkex._transport.breaker import DEFAULTS
from tinkex.observability.events import CircuitChanged, Event, RequestStarted

KEY = "tml-canary-key-0123456789"
FAILURE_THRESHOLD = DEFAULTS.failure_threshold


class RecordingSink:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)

    @property
    def changes(self) -> list[CircuitChanged]:
        return [event for event in self.events if isinstance(event, CircuitChanged)]

    def first_change(self) -> CircuitChanged:
        """Waits for the first change: on a busy machine events may arrive after the result of their call."""
        deadline = time.monotonic() + 60
        while not self.changes:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return self.changes[0]

    @property
    def sent(self) -> int:
        return len([event for event in self.events if isinstance(event, RequestStarted)])


@pytest.fixture
def sink() -> RecordingSink:
    return RecordingSink()


def rest_of(url: str, sink: RecordingSink, **settings: Any) -> tinkex.RestClient:
    config = tinkex.Config(api_key=KEY, base_url=url, max_retries=0, **settings)
    return tinkex.RestClient(config=config, events=sink)


@contextmanager
def listening() -> Iterator[str]:
    """A server that accepts connections and never responds."""
    taken: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    taken.append(server.accept()[0])

        accepting = threading.Thread(target=accept, daemon=True)
        accepting.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        accepting.join()
    for one in taken:
        one.close()


@contextmanager
def nobody() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    yield f"http://127.0.0.1:{port}"


@contextmanager
def no_such_name() -> Iterator[str]:
    yield "http://no-such-host.invalid:8787"


@contextmanager
def no_name_at_all() -> Iterator[str]:
    yield f"http://{'a' * 70}.invalid:8787"


@contextmanager
def strange_authority(folder: Path) -> Iterator[str]:
    with secure(ScriptedServer(), certificates(folder)) as secured:
        yield secured.url


@contextmanager
def plain_where_tls_is_spoken(folder: Path) -> Iterator[str]:
    with secure(ScriptedServer(), certificates(folder)) as secured:
        yield secured.url.replace("https://", "http://")


@pytest.mark.slow
@pytest.mark.parametrize(
    "trouble",
    [nobody, no_such_name, no_name_at_all, strange_authority, plain_where_tls_is_spoken, listening],
    ids=lambda trouble: trouble.__name__,
)
def test_every_connection_failure_opens_the_circuit_with_its_reason(
    trouble: Any, sink: RecordingSink, tmp_path: Path
) -> None:
    takes_a_folder = trouble in {strange_authority, plain_where_tls_is_spoken}
    with trouble(tmp_path) if takes_a_folder else trouble() as url:
        rest = rest_of(url, sink, timeout=0.3 if trouble is listening else 30.0)
        for _ in range(FAILURE_THRESHOLD):
            with pytest.raises(tinkex.APIConnectionError) as failed:
                rest.get_health().result(60)
            assert not isinstance(failed.value, tinkex.CircuitOpenError)
        no_reply = {listening: "healthz", plain_where_tls_is_spoken: "healthz"}
        name = no_reply.get(trouble, "connection")
        assert sink.first_change().reason == failed.value.message
        assert [(change.endpoint, change.state) for change in sink.changes] == [(name, "open")]
        assert circuit_breakers.state(url, name) != "closed"
        if circuit_breakers.state(url, name) == "open":  # a slow machine may have passed its timeout
            sent = sink.sent
            with pytest.raises(tinkex.CircuitOpenError, match="circuit_breaker=False") as caught:
                rest.get_health().result(60)
            assert failed.value.message in str(caught.value)
            assert KEY not in str(caught.value)
            assert sink.sent == sent


def test_while_the_half_open_probe_hangs_other_calls_are_rejected_with_retry_after(
    sink: RecordingSink,
) -> None:
    with listening() as url:
        rest = rest_of(url, sink, circuit_breaker_failures=1, circuit_breaker_cooldown=0.01, timeout=60.0)
        quick = rest_of(
            url, RecordingSink(), circuit_breaker_failures=1, circuit_breaker_cooldown=0.01, timeout=0.05
        )
        with pytest.raises(tinkex.APITimeoutError):
            quick.get_health().result(60)
        until(lambda: circuit_breakers.state(url, "healthz") == "half_open")
        hanging = rest.get_health()
        until(lambda: sink.sent == 1)
        for _ in range(50):
            with pytest.raises(tinkex.CircuitOpenError) as caught:
                rest.get_health().result(60)
            assert caught.value.retry_after_s > 0, "otherwise a program that follows it would spin"
        assert sink.sent == 1
        hanging.cancel()

        def probes_again() -> bool:
            again = rest.get_health()
            until(lambda: sink.sent == 2 or again.done())
            again.cancel()
            return sink.sent == 2

        until(probes_again)


def until(condition: Any) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_cancelled_calls_do_not_count_as_failures(sink: RecordingSink) -> None:
    with listening() as url:
        rest = rest_of(url, sink, timeout=60.0)
        for count in range(2 * FAILURE_THRESHOLD):
            asking = rest.get_health()
            until(lambda count=count: sink.sent == count + 1)
            asking.cancel()
        assert sink.changes == []
        assert circuit_breakers.state(url, "healthz") == "closed"


@pytest.mark.slow
def test_a_circuit_is_per_endpoint(sink: RecordingSink) -> None:
    with running(FaultyServer("optim_step", fails_with(500))) as server:
        config = tinkex.Config(api_key=KEY, base_url=server.url, max_retries=0)
        with tinkex.ServiceClient(config=config, events=sink) as service:
            training = service.create_lora_training_client("toy")
            for _ in range(FAILURE_THRESHOLD):
                with pytest.raises(tinkex.InternalServerError):
                    training.optim_step(tinkex.AdamParams()).result(60)
            assert sink.first_change().endpoint == "optim_step"
            assert {change.endpoint for change in sink.changes} == {"optim_step"}
            assert circuit_breakers.state(server.url, "optim_step", KEY) != "closed"
            service.get_server_capabilities()
            sampler = service.create_sampling_client(base_model="toy")
            prompt = tinkex.ModelInput.from_ints([1])
            sampler.sample(prompt, 1, tinkex.SamplingParams(max_tokens=1)).result(60)
