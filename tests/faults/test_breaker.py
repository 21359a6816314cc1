"""The circuit breaker and failures without a status: DNS, certificates, servers that hang, cancelled calls."""

from __future__ import annotations

import contextlib
import os
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
from tinkex._transport.breaker import FAILURES, Breaker, breakers
from tinkex._transport.shared import server_of
from tinkex.observability.events import CircuitChanged, Event, RequestStarted

KEY = "tml-canary-key-0123456789"


class RecordingSink:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)

    @property
    def changes(self) -> list[CircuitChanged]:
        return [event for event in self.events if isinstance(event, CircuitChanged)]

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
        for _ in range(FAILURES):
            with pytest.raises(tinkex.APIConnectionError) as failed:
                rest.get_health().result(60)
            assert not isinstance(failed.value, tinkex.CircuitOpenError)
        assert [(change.purpose, change.state) for change in sink.changes] == [("rest", "open")]
        assert sink.changes[0].reason == failed.value.message
        breaker = breakers.of(server_of(url), "rest")
        assert breaker.state != "closed"
        if breaker.state == "open":  # a slow machine may have passed its timeout
            sent = sink.sent
            with pytest.raises(tinkex.CircuitOpenError, match="circuit_breaker=False") as caught:
                rest.get_health().result(60)
            assert failed.value.message in str(caught.value)
            assert KEY not in str(caught.value)
            assert sink.sent == sent


def half_open(url: str, clock: list[float]) -> Breaker:
    """Replaces a server's breaker by one that is about to be half-open."""
    breaker = Breaker(failures=1, reset_s=5.0, clock=lambda: clock[0])
    breakers._breakers[os.getpid(), server_of(url), "rest"] = breaker
    passing = breaker.enter()
    assert passing is not None
    passing.failed("down")
    clock[0] += 6.0
    assert breaker.state == "half_open"
    return breaker


def test_while_the_half_open_probe_hangs_other_calls_are_rejected_with_retry_after(
    sink: RecordingSink,
) -> None:
    with listening() as url:
        breaker = half_open(url, [0.0])
        rest = rest_of(url, sink, timeout=60.0)
        hanging = rest.get_health()
        until(lambda: sink.sent == 1)
        for _ in range(50):
            with pytest.raises(tinkex.CircuitOpenError) as caught:
                rest.get_health().result(60)
            assert caught.value.retry_after_s > 0, "otherwise a program that follows it would spin"
        assert sink.sent == 1
        hanging.cancel()
        until(lambda: breaker.left_s == 0)
        again = rest.get_health()
        until(lambda: sink.sent == 2)
        again.cancel()


def until(condition: Any) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_cancelled_calls_do_not_count_as_failures(sink: RecordingSink) -> None:
    with listening() as url:
        rest = rest_of(url, sink, timeout=60.0)
        for count in range(2 * FAILURES):
            asking = rest.get_health()
            until(lambda count=count: sink.sent == count + 1)
            asking.cancel()
        assert sink.changes == []
        assert breakers.of(server_of(url), "rest").state == "closed"


@pytest.mark.slow
def test_a_circuit_is_per_endpoint(sink: RecordingSink) -> None:
    with running(FaultyServer("optim_step", fails_with(500))) as server:
        config = tinkex.Config(api_key=KEY, base_url=server.url, max_retries=0)
        with tinkex.ServiceClient(config=config, events=sink) as service:
            training = service.create_lora_training_client("toy")
            for _ in range(FAILURES):
                with pytest.raises(tinkex.InternalServerError):
                    training.optim_step(tinkex.AdamParams()).result(60)
            assert {change.purpose for change in sink.changes} == {"train"}
            service.get_server_capabilities()
            sampler = service.create_sampling_client(base_model="toy")
            prompt = tinkex.ModelInput.from_ints([1])
            sampler.sample(prompt, 1, tinkex.SamplingParams(max_tokens=1)).result(60)
