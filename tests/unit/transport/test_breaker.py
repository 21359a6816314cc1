from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
import threading
import time

import pytest

from tests.scripted import ScriptedServer, over_http
from tinkex import Config
from tinkex._runtime import background
from tinkex._transport.breaker import Breaker, BreakerRegistry
from tinkex._transport.caller import Caller
from tinkex._transport.circuit import Circuit, circuit_of
from tinkex._transport.local import LocalTransport
from tinkex._transport.retry import NO_RETRIES
from tinkex._transport.shared import SharedHttp, normalized_url
from tinkex._wire.endpoints import endpoint
from tinkex.errors import (
    APIConnectionError,
    APIStatusError,
    CircuitOpenError,
    InternalServerError,
    NotFoundError,
)
from tinkex.observability.events import CircuitChanged, Event, RequestStarted
from tinkex.testing import MockTransport, Reply, Request, reply

HEALTH, CAPABILITIES, CONFIG = (
    endpoint("healthz"),
    endpoint("get_server_capabilities"),
    endpoint("client_config"),
)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def fail(breaker: Breaker, times: int = 1) -> None:
    for _ in range(times):
        passing = breaker.acquire()
        assert passing is not None
        passing.failed("down")


def test_it_opens_after_failures_in_a_row_and_a_success_between_them_starts_over() -> None:
    breaker = Breaker(failure_threshold=3, clock=Clock())
    fail(breaker, 2)
    passing = breaker.acquire()
    assert passing is not None
    passing.succeeded()
    fail(breaker, 2)
    assert breaker.state == "closed"
    fail(breaker)
    assert (breaker.state, breaker.acquire(), breaker.reason) == ("open", None, "down")


def test_after_a_while_exactly_one_of_many_callers_may_probe() -> None:
    clock = Clock()
    breaker = Breaker(failure_threshold=1, reset_timeout_s=5, clock=clock)
    fail(breaker)
    clock.now = 5.0
    assert breaker.state == "half_open"
    start = threading.Barrier(8)
    probes: list[object] = []

    def try_it() -> None:
        start.wait()
        passing = breaker.acquire()
        if passing is not None:
            probes.append(passing)

    threads = [threading.Thread(target=try_it) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(probes) == 1


def test_a_probe_closes_or_reopens_the_breaker_and_a_cancelled_probe_is_replaced() -> None:
    clock = Clock()
    breaker = Breaker(failure_threshold=1, reset_timeout_s=5, clock=clock)
    fail(breaker)
    clock.now = 5.0
    given_up = breaker.acquire()
    assert given_up is not None
    given_up.abandoned()
    fail(breaker)
    assert (breaker.state, breaker.retry_after_s) == ("open", 5.0)
    clock.now = 10.0
    probe = breaker.acquire()
    assert probe is not None
    assert probe.succeeded() == "closed"
    assert breaker.state == "closed"


def test_calls_rejected_during_a_probe_have_a_positive_retry_after() -> None:
    """Else a program that sleeps as long as it is told would spin until the probe ends, which may hang."""
    clock = Clock()
    breaker = Breaker(failure_threshold=1, reset_timeout_s=5, clock=clock)
    fail(breaker)
    assert breaker.retry_after_s == 5.0
    clock.now = 6.0
    assert breaker.retry_after_s == 0.0
    probe = breaker.acquire()
    assert probe is not None
    assert breaker.acquire() is None
    assert breaker.retry_after_s > 0
    probe.succeeded()
    assert breaker.retry_after_s == 0.0


def test_a_call_from_before_it_opened_changes_nothing() -> None:
    breaker = Breaker(failure_threshold=1, clock=Clock())
    early = breaker.acquire()
    assert early is not None
    fail(breaker)
    assert early.succeeded() is None
    assert breaker.state == "open"


def test_the_registry_is_bounded_and_keeps_endpoint_classes_apart() -> None:
    known = BreakerRegistry(max_breakers=2, failure_threshold=1)
    fail(known.get("http://a", "train"))
    assert known.states() == {("http://a", "train"): "open"}
    assert known.get("http://a", "retrieve").state == "closed"
    known.get("http://b", "train")
    assert len(known.states()) == 2
    assert known.get("http://a", "train").state == "closed", "the one used longest ago was forgotten"


class Heard:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)

    @property
    def changes(self) -> list[tuple[str, str]]:
        return [(e.purpose, e.state) for e in self.events if isinstance(e, CircuitChanged)]

    @property
    def sent(self) -> int:
        return len([e for e in self.events if isinstance(e, RequestStarted)])


def caller_of(url: str, heard: Heard, reset_s: float = 60.0) -> Caller:
    config = Config(api_key="tml-test", base_url=url)
    circuit = Circuit(url, BreakerRegistry(failure_threshold=3, reset_timeout_s=reset_s), heard)
    return Caller(SharedHttp(config), config, sink=heard, policy=NO_RETRIES, circuit=circuit)


def ask(caller: Caller, row: object = HEALTH) -> object:
    return background().run(caller.call(row))  # type: ignore[arg-type]


def test_the_circuit_opens_when_a_server_fails_and_closes_when_it_recovers() -> None:
    heard, scripted = Heard(), ScriptedServer()
    scripted.answers["get_server_capabilities"] = lambda v, r: reply({}, 503)
    with over_http(scripted) as url:
        caller = caller_of(url, heard, reset_s=0.2)
        for _ in range(3):
            with pytest.raises(InternalServerError):
                ask(caller, CAPABILITIES)
        assert heard.changes == [("rest", "open")]
        sent = heard.sent
        with pytest.raises(CircuitOpenError, match="keep failing") as caught:
            ask(caller, CAPABILITIES)
        assert heard.sent == sent, "nothing goes out"
        assert pickle.loads(pickle.dumps(caught.value)).retry_after_s == caught.value.retry_after_s
        ask(caller, CONFIG)  # another class of endpoint is not touched
        del scripted.answers["get_server_capabilities"]
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            try:
                ask(caller, CAPABILITIES)
                break
            except CircuitOpenError as error:
                time.sleep(error.retry_after_s)
        assert heard.changes == [("rest", "open"), ("rest", "closed")]
        background().run(caller.close())


def test_connection_failures_count_and_client_errors_do_not() -> None:
    heard, scripted = Heard(), ScriptedServer()
    scripted.answers["get_server_capabilities"] = lambda v, r: reply({"detail": "no"}, 404)
    with over_http(scripted) as url:
        caller = caller_of(url, heard)
        for _ in range(5):
            with pytest.raises(NotFoundError):
                ask(caller, CAPABILITIES)
        assert heard.changes == []
    for _ in range(3):
        with pytest.raises(APIConnectionError):
            ask(caller)
    with pytest.raises(CircuitOpenError):
        ask(caller)
    background().run(caller.close())


@pytest.mark.parametrize("status", [400, 401, 402, 404, 408, 409, 410, 413, 422, 429, 501, 507])
def test_client_errors_are_no_failures_and_close_a_half_open_breaker(status: int) -> None:
    clock, scripted = Clock(), ScriptedServer()
    scripted.answers["get_server_capabilities"] = lambda v, r: reply({"detail": "no"}, status)
    heard = Heard()
    known = BreakerRegistry(failure_threshold=3, reset_timeout_s=10.0, clock=clock)
    with over_http(scripted) as url:
        config = Config(api_key="tml-test", base_url=url)
        circuit = Circuit(url, known, heard)
        breaker = known.get(normalized_url(url), "rest")
        caller = Caller(SharedHttp(config), config, sink=heard, policy=NO_RETRIES, circuit=circuit)
        for _ in range(5):
            with pytest.raises(APIStatusError):
                ask(caller, CAPABILITIES)
        assert breaker.state == "closed"
        fail(breaker, 3)
        clock.now += 11.0
        with pytest.raises(APIStatusError):
            ask(caller, CAPABILITIES)
        assert breaker.state == "closed", "a server that replies is not failing"
        background().run(caller.close())


class Raising(Heard):
    """A sink with a mistake in it."""

    def emit(self, event: Event) -> None:
        super().emit(event)
        if isinstance(event, RequestStarted):
            raise RuntimeError("a mistake of the user's")


@pytest.mark.parametrize("how", ["call", "stream"])
@pytest.mark.parametrize("what", ["a sink that raises", "a caller that gives up"])
async def test_a_cancelled_probe_is_replaced_by_the_next_call(how: str, what: str) -> None:
    """Otherwise an open breaker would stay open for ever."""
    clock = Clock()
    known = BreakerRegistry(failure_threshold=1, clock=clock)
    url, raises = "http://mock.invalid", what == "a sink that raises"
    breaker = known.get(normalized_url(url), "rest")
    heard: Heard = Raising() if raises else Heard()
    asked = asyncio.Event()

    async def never(request: Request) -> Reply:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    config = Config(api_key="tml-test", base_url=url)
    caller = Caller(
        MockTransport(never), config, sink=heard, policy=NO_RETRIES, circuit=Circuit(url, known, heard)
    )
    fail(breaker)
    clock.now += 100.0
    assert breaker.state == "half_open"
    probing = asyncio.ensure_future(caller.call(HEALTH) if how == "call" else caller.stream(HEALTH, None))
    if raises:
        with pytest.raises(RuntimeError, match="a mistake"):
            await probing
    else:
        await asked.wait()
        assert breaker.acquire() is None, "one probes"
        probing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await probing
    assert breaker.acquire() is not None, "the next one may"


def test_it_can_be_switched_off_and_is_only_for_the_network() -> None:
    on = Config(api_key="tml-test", base_url="http://127.0.0.1:9")
    off = Config(api_key="tml-test", base_url="http://127.0.0.1:9", circuit_breaker=False)
    assert circuit_of(SharedHttp(on), on, Heard()) is not None
    assert circuit_of(SharedHttp(off), off, Heard()) is None
    assert circuit_of(LocalTransport(), on, Heard()) is None
    assert not Config.resolve(environ={"TINKEX_CIRCUIT_BREAKER": "0"}, needs_key=False).circuit_breaker


def test_a_forked_child_finds_out_for_itself_even_if_the_parent_was_just_writing() -> None:
    program = """
import os
from tinkex._transport.breaker import breakers
for _ in range(5):
    breakers.get("http://a", "rest").acquire().failed("down")
with breakers._lock, breakers._breakers[os.getpid(), "http://a", "rest"]._lock:
    child = os.fork()
    if child == 0:
        os._exit(0 if breakers.get("http://a", "rest").acquire() and len(breakers.states()) == 1 else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert breakers.states() == {("http://a", "rest"): "open"}
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
