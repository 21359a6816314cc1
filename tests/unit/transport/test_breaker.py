"""Circuit breakers: the breaker itself, the registry, and the calls of clients."""

from __future__ import annotations

import asyncio
import gc
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.scripted import ScriptedServer, over_http
from tinkex import CircuitBreaker, Config, ServiceClient, circuit_breakers
from tinkex._runtime import background
from tinkex._transport.breaker import BreakerRegistry
from tinkex._transport.caller import Caller
from tinkex._transport.circuit import Circuit, circuit_of
from tinkex._transport.local import LocalTransport
from tinkex._transport.retry import NO_RETRIES
from tinkex._transport.shared import SharedHttp
from tinkex._wire.endpoints import endpoint
from tinkex.errors import (
    APIConnectionError,
    APIStatusError,
    APITimeoutError,
    CircuitOpenError,
    ConfigError,
    HttpResponse,
    InternalServerError,
    NotFoundError,
)
from tinkex.observability.events import CircuitChanged, Event, NullSink, RequestStarted
from tinkex.testing import MockTransport, Reply, Request, reply

HEALTH, CAPABILITIES, CONFIG, ARCHIVE = (
    endpoint("healthz"),
    endpoint("get_server_capabilities"),
    endpoint("client_config"),
    endpoint("checkpoint_archive"),
)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


# ---- the breaker ----


def enter(breaker: CircuitBreaker) -> int:
    permit = breaker.acquire()
    assert permit is not None
    return permit


def fail(breaker: CircuitBreaker, times: int = 1) -> None:
    for _ in range(times):
        breaker.record(enter(breaker), "down")


def breaker_of(failures: int = 1, probes: int = 1) -> tuple[CircuitBreaker, Clock]:
    clock = Clock()
    return CircuitBreaker(
        "it", failure_threshold=failures, cooldown_s=5, max_probes=probes, clock=clock
    ), clock


def test_it_opens_after_failures_in_a_row_and_a_success_between_them_starts_over() -> None:
    breaker, _ = breaker_of(failures=3)
    fail(breaker, 2)
    breaker.record(enter(breaker), None)
    fail(breaker, 2)
    assert breaker.state() == "closed"
    fail(breaker)
    assert (breaker.state(), breaker.acquire(), breaker.reason) == ("open", None, "down")


@pytest.mark.parametrize("probes", [1, 3])
def test_after_the_cool_down_only_so_many_of_many_callers_may_probe(probes: int) -> None:
    breaker, clock = breaker_of(probes=probes)
    fail(breaker)
    clock.now = 5.0
    assert breaker.state() == "half_open"
    start = threading.Barrier(8)
    permits: list[int] = []

    def try_it() -> None:
        start.wait()
        permit = breaker.acquire()
        if permit is not None:
            permits.append(permit)

    threads = [threading.Thread(target=try_it) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(permits)) == probes


def test_a_probe_closes_or_reopens_the_breaker_and_a_cancelled_probe_is_replaced() -> None:
    breaker, clock = breaker_of()
    fail(breaker)
    clock.now = 5.0
    breaker.abandon(enter(breaker))
    fail(breaker)
    assert (breaker.state(), breaker.retry_after_s) == ("open", 5.0)
    clock.now = 10.0
    assert breaker.record(enter(breaker), None) == "closed"
    assert breaker.state() == "closed"


def test_of_several_probes_the_first_failure_reopens_it_and_the_others_no_longer_count() -> None:
    breaker, clock = breaker_of(probes=2)
    fail(breaker)
    clock.now = 5.0
    one, two = enter(breaker), enter(breaker)
    assert breaker.record(one, "still down") == "open"
    assert breaker.record(two, None) is None
    assert (breaker.state(), breaker.reason) == ("open", "still down")


def test_calls_rejected_during_a_probe_have_a_positive_retry_after() -> None:
    """Else a program that sleeps as long as the error says would spin until the probe ends, which may hang."""
    breaker, clock = breaker_of()
    fail(breaker)
    assert breaker.retry_after_s == 5.0
    clock.now = 6.0
    assert breaker.retry_after_s == 0.0
    probe = enter(breaker)
    assert breaker.acquire() is None
    assert breaker.retry_after_s > 0
    breaker.record(probe, None)
    assert breaker.retry_after_s == 0.0


def test_a_call_from_before_it_opened_changes_nothing() -> None:
    breaker, _ = breaker_of()
    early = enter(breaker)
    fail(breaker)
    assert breaker.record(early, None) is None
    assert breaker.state() == "open"


def test_a_function_is_called_through_a_breaker_until_it_keeps_failing() -> None:
    clock, changes = Clock(), list[tuple[str, str]]()
    breaker = CircuitBreaker(
        "search",
        failure_threshold=2,
        cooldown_s=5,
        on_change=lambda state, reason: changes.append((state, reason)),
        clock=clock,
    )
    calls = []

    def work(*, fails: bool = False) -> str:
        calls.append(fails)
        if fails:
            raise LookupError("gone")
        return "fine"

    assert breaker.call(work) == "fine"
    for _ in range(2):
        with pytest.raises(LookupError):
            breaker.call(work, fails=True)
    with pytest.raises(CircuitOpenError, match=r"search was not called.*LookupError: gone") as caught:
        breaker.call(work)
    assert caught.value.retry_after_s == 5.0
    assert len(calls) == 3
    clock.now = 5.0
    assert breaker.call(work) == "fine"
    assert changes == [
        ("open", "LookupError: gone"),
        ("half_open", "the cool-down is over"),
        ("closed", "it works again"),
    ]


def test_reset_closes_a_breaker() -> None:
    breaker, _ = breaker_of()
    fail(breaker)
    breaker.reset()
    assert breaker.state() == "closed"
    assert breaker.call(len, "abc") == 3


def raises(error: BaseException) -> Callable[[], None]:
    def function() -> None:
        raise error

    return function


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (ValueError("x"), "open"),
        (APIConnectionError(None, "cut"), "open"),
        (APIStatusError("x", HttpResponse(503)), "open"),
        (APIStatusError("x", HttpResponse(404)), "closed"),
        (APIStatusError("x", HttpResponse(429)), "closed"),
        (APIStatusError("x", HttpResponse(501)), "closed"),
        (KeyboardInterrupt(), "closed"),
    ],
)
def test_which_exceptions_of_a_function_are_failures(error: BaseException, state: str) -> None:
    breaker, _ = breaker_of()
    with pytest.raises(type(error)):
        breaker.call(raises(error))
    assert breaker.state() == state


async def test_an_async_function_is_called_the_same_way_and_a_cancelled_call_does_not_count() -> None:
    breaker, clock = breaker_of()

    async def work(answer: str) -> str:
        await asyncio.sleep(0)
        if not answer:
            raise LookupError("gone")
        return answer

    assert await breaker.call_async(work, "fine") == "fine"
    with pytest.raises(LookupError):
        await breaker.call_async(work, "")
    with pytest.raises(CircuitOpenError):
        await breaker.call_async(work, "fine")
    clock.now = 5.0
    probing = asyncio.ensure_future(breaker.call_async(asyncio.Event().wait))
    await asyncio.sleep(0)
    probing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await probing
    assert await breaker.call_async(work, "fine") == "fine"
    assert breaker.state() == "closed"


@pytest.mark.parametrize("wrong", [{"failure_threshold": 0}, {"cooldown_s": 0}, {"max_probes": 0}])
def test_a_breaker_without_sensible_settings_is_rejected(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        CircuitBreaker("it", **wrong)


# ---- the registry ----


def config_of(url: str = "http://a.invalid", key: str | None = "tml-one", **settings: Any) -> Config:
    return Config(base_url=url, api_key=key, **settings)


DIFFERENT: list[tuple[Config, str]] = [
    (config_of(), "optim_step"),
    (config_of(key="tml-two"), "asample"),
    (config_of(key=None), "asample"),
    (config_of(url="http://b.invalid"), "asample"),
    (config_of(url="http://a.invalid/prefix"), "asample"),
    (config_of(circuit_breaker_failures=2), "asample"),
    (config_of(circuit_breaker_cooldown=2), "asample"),
    (config_of(circuit_breaker_probes=2), "asample"),
    (config_of(proxy="http://proxy.invalid"), "asample"),
]


@pytest.mark.parametrize(("config", "name"), DIFFERENT, ids=range(len(DIFFERENT)))
def test_breakers_are_per_server_key_endpoint_and_settings(config: Config, name: str) -> None:
    registry = BreakerRegistry()
    one = registry.get(config_of(), "asample")
    assert registry.get(config_of(url="HTTP://A.invalid:80/"), "asample") is one
    assert registry.get(config, name) is not one


def test_keys_share_only_the_breaker_of_the_connections() -> None:
    registry = BreakerRegistry()
    assert registry.get(config_of(), "connection") is registry.get(config_of(key="tml-two"), "connection")
    assert registry.get(config_of(), "connection") is not registry.get(config_of("http://b"), "connection")
    proxied = config_of(proxy="http://proxy.invalid")
    assert registry.get(config_of(), "connection") is not registry.get(proxied, "connection")


def test_a_breaker_with_failures_outlives_its_client_and_others_are_dropped() -> None:
    registry = BreakerRegistry(max_failing=2)

    def use(name: str, failures: int) -> None:
        breaker = registry.get(config_of(), name)
        for _ in range(failures):
            fail(breaker)
            registry.keep(breaker)

    use("asample", 5)
    use("optim_step", 0)
    gc.collect()
    assert [(each.endpoint, each.state, each.reason) for each in registry.states()] == [
        ("asample", "open", "down")
    ]
    use("healthz", 5)
    use("forward_backward", 5)
    gc.collect()
    assert {each.endpoint for each in registry.states()} == {"healthz", "forward_backward"}, (
        "the one used longest ago was dropped"
    )


def test_states_are_read_and_reset_by_server_endpoint_and_key() -> None:
    registry = BreakerRegistry()
    one, two = (registry.get(config_of(key=key), "asample") for key in ("tml-one", "tml-two"))
    fail(one, 5)
    url = "http://a.invalid"
    assert registry.state(url, "asample") == "open"
    assert registry.state(url, "asample", "tml-one") == "open"
    assert registry.state(url, "asample", "tml-two") == "closed"
    assert registry.state(url, "optim_step") == registry.state("http://b.invalid", "asample") == "closed"
    assert registry.reset(url, "asample", "tml-two") == registry.reset("http://b.invalid") == 0
    assert registry.state(url, "asample") == "open"
    assert registry.reset(url) == 1
    assert registry.state(url, "asample") == "closed"
    fail(two, 5)
    assert registry.reset() == 1
    assert "tml-" not in repr(registry.states())


# ---- the calls of clients ----


class RecordingSink:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)

    @property
    def changes(self) -> list[tuple[str, str]]:
        return [(e.endpoint, e.state) for e in self.events if isinstance(e, CircuitChanged)]

    @property
    def sent(self) -> int:
        return len([e for e in self.events if isinstance(e, RequestStarted)])


def caller_of(
    url: str,
    received: RecordingSink,
    key: str = "tml-test",
    registry: BreakerRegistry | None = None,
    **settings: Any,
) -> Caller:
    config = Config(
        api_key=key,
        base_url=url,
        circuit_breaker_failures=3,
        circuit_breaker_cooldown=60.0,
        **settings,
    )
    circuit = Circuit(config, registry or BreakerRegistry(), received)
    return Caller(SharedHttp(config), config, sink=received, policy=NO_RETRIES, circuit=circuit)


def ask(caller: Caller, row: object = HEALTH) -> object:
    return background().run(caller.call(row))  # type: ignore[arg-type]


def test_the_circuit_opens_when_a_server_fails_and_closes_when_it_recovers() -> None:
    received, scripted = RecordingSink(), ScriptedServer()
    scripted.answers["get_server_capabilities"] = lambda v, r: reply({}, 503)
    with over_http(scripted) as url:
        clock = Clock()
        caller = caller_of(url, received, registry=BreakerRegistry(clock=clock))
        for _ in range(3):
            with pytest.raises(InternalServerError):
                ask(caller, CAPABILITIES)
        assert received.changes == [("get_server_capabilities", "open")]
        sent = received.sent
        with pytest.raises(CircuitOpenError, match="get_server_capabilities keeps failing") as caught:
            ask(caller, CAPABILITIES)
        assert received.sent == sent, "nothing goes out"
        assert pickle.loads(pickle.dumps(caught.value)).retry_after_s == caught.value.retry_after_s
        ask(caller, CONFIG)  # another endpoint is not touched
        del scripted.answers["get_server_capabilities"]
        clock.now += caught.value.retry_after_s
        ask(caller, CAPABILITIES)
        name = "get_server_capabilities"
        assert received.changes == [(name, "open"), (name, "half_open"), (name, "closed")]
        background().run(caller.close())


def test_connection_failures_count_and_client_errors_do_not() -> None:
    received, scripted = RecordingSink(), ScriptedServer()
    scripted.answers["get_server_capabilities"] = lambda v, r: reply({"detail": "no"}, 404)
    with over_http(scripted) as url:
        caller = caller_of(url, received)
        for _ in range(5):
            with pytest.raises(NotFoundError):
                ask(caller, CAPABILITIES)
        assert received.changes == []
    for _ in range(3):
        with pytest.raises(APIConnectionError):
            ask(caller)
    with pytest.raises(CircuitOpenError):
        ask(caller)
    background().run(caller.close())


@pytest.mark.parametrize("status", [400, 401, 402, 404, 408, 409, 410, 413, 422, 429, 501, 507])
def test_client_errors_are_not_failures_and_close_a_half_open_breaker(status: int) -> None:
    clock, scripted = Clock(), ScriptedServer()
    scripted.answers["get_server_capabilities"] = lambda v, r: reply({"detail": "no"}, status)
    received = RecordingSink()
    registry = BreakerRegistry(clock=clock)
    with over_http(scripted) as url:
        caller = caller_of(url, received, registry=registry)
        breaker = registry.get(caller.config, "get_server_capabilities")
        for _ in range(5):
            with pytest.raises(APIStatusError):
                ask(caller, CAPABILITIES)
        assert breaker.state() == "closed"
        fail(breaker, 3)
        clock.now += caller.config.circuit_breaker_cooldown + 1.0
        with pytest.raises(APIStatusError):
            ask(caller, CAPABILITIES)
        assert breaker.state() == "closed", "a server that replies is not failing"
        background().run(caller.close())


def test_the_failures_of_one_key_and_endpoint_block_no_other() -> None:
    """Five 503s of a listing once kept the training client of another tenant from opening."""
    scripted = ScriptedServer()
    scripted.answers["get_server_capabilities"] = lambda v, r: reply({"detail": "down"}, 503)
    with over_http(scripted) as url:
        one, two = (
            ServiceClient(config=Config(api_key=key, base_url=url, max_retries=0), events=NullSink())
            for key in ("tml-one", "tml-two")
        )
        with one, two:
            for _ in range(5):
                with pytest.raises(InternalServerError):
                    one.get_server_capabilities()
            with pytest.raises(CircuitOpenError):
                one.get_server_capabilities()
            assert circuit_breakers.state(url, "get_server_capabilities", "tml-one") == "open"
            assert circuit_breakers.state(url, "get_server_capabilities", "tml-two") == "closed"
            with pytest.raises(InternalServerError):
                two.get_server_capabilities()
            for service in (one, two):
                service.create_lora_training_client("toy")
                service.create_rest_client().get_weights_info_by_tinker_path("tinker://r/weights/a").result(
                    30
                )
            assert circuit_breakers.reset(url, "get_server_capabilities") == 1
            with pytest.raises(InternalServerError):
                one.get_server_capabilities()


@pytest.mark.parametrize("closed_by", ["reset", "another client"])
def test_a_client_that_reported_an_open_breaker_reports_that_it_closed(closed_by: str) -> None:
    scripted, clock = ScriptedServer(), Clock()
    scripted.answers["get_server_capabilities"] = lambda v, r: reply({}, 503)
    registry = BreakerRegistry(clock=clock)
    name = "get_server_capabilities"
    with over_http(scripted) as url:
        first, second, unaware = RecordingSink(), RecordingSink(), RecordingSink()
        callers = [caller_of(url, sink, registry=registry) for sink in (first, second, unaware)]
        for _ in range(3):
            with pytest.raises(InternalServerError):
                ask(callers[0], CAPABILITIES)
        if closed_by == "reset":
            assert registry.reset(url) == 1
        else:
            del scripted.answers[name]
            clock.now += 60
            ask(callers[1], CAPABILITIES)
            assert second.changes == [(name, "half_open"), (name, "closed")]
        assert first.changes == [(name, "open"), (name, "closed")]
        assert unaware.changes == []
        for caller in callers:
            background().run(caller.close())


def nobody() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"


def test_a_server_that_cannot_be_reached_is_known_to_all_keys_and_endpoints() -> None:
    registry, received, url = BreakerRegistry(), RecordingSink(), nobody()
    one = caller_of(url, received, registry=registry)
    for row in (HEALTH, CAPABILITIES, CONFIG):
        with pytest.raises(APIConnectionError, match="refused"):
            ask(one, row)
    assert received.changes == [("connection", "open")]
    assert registry.state(url) == "open"
    two = caller_of(url, received, key="tml-two", registry=registry)
    with pytest.raises(CircuitOpenError, match=r"connections to it keep failing.*refused"):
        ask(two, CAPABILITIES)
    assert received.sent == 3
    for caller in (one, two):
        background().run(caller.close())


def test_a_call_that_times_out_is_a_failure_of_its_endpoint_only() -> None:
    registry, received = BreakerRegistry(), RecordingSink()
    with socket.create_server(("127.0.0.1", 0), backlog=16) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        caller = caller_of(url, received, registry=registry, timeout=0.02)
        for _ in range(3):
            with pytest.raises(APITimeoutError):
                ask(caller)
        with pytest.raises(CircuitOpenError, match="healthz keeps failing"):
            ask(caller)
        assert registry.state(url) == "closed"
        with pytest.raises(APITimeoutError):
            ask(caller, CAPABILITIES)
        background().run(caller.close())


@pytest.mark.parametrize(
    ("row", "status", "headers", "state"),
    [
        (ARCHIVE, 503, {"retry-after": "1"}, "closed"),
        (ARCHIVE, 503, {"retry-after-ms": "250"}, "closed"),
        (ARCHIVE, 503, {}, "open"),
        (ARCHIVE, 500, {"retry-after": "1"}, "open"),
        (CAPABILITIES, 503, {"retry-after": "1"}, "open"),
    ],
    ids=str,
)
def test_an_archive_that_is_being_made_is_not_a_failure(
    row: Any, status: int, headers: dict[str, str], state: str
) -> None:
    registry, received = BreakerRegistry(), RecordingSink()
    scripted = ScriptedServer(**{row.name: lambda v, r: reply({"detail": "wait"}, status, headers=headers)})
    path = {"training_run_id": "r", "checkpoint_id": "weights/a"} if row is ARCHIVE else None
    with over_http(scripted) as url:
        caller = caller_of(url, received, registry=registry)
        for _ in range(3):
            with pytest.raises(InternalServerError):
                background().run(caller.call(row, path=path))
        assert registry.state(url, row.name) == state
        background().run(caller.close())


def test_the_settings_of_the_breaker_are_respected() -> None:
    received, scripted = RecordingSink(), ScriptedServer()
    scripted.answers["healthz"] = lambda v, r: reply({}, 500)
    with over_http(scripted) as url:
        config = Config(
            api_key="tml-test",
            base_url=url,
            circuit_breaker_failures=1,
            circuit_breaker_cooldown=1000,
            circuit_breaker_probes=2,
        )
        caller = Caller(SharedHttp(config), config, sink=received, policy=NO_RETRIES)
        with pytest.raises(InternalServerError):
            ask(caller)
        with pytest.raises(CircuitOpenError) as caught:
            ask(caller)
        assert caught.value.retry_after_s > 900
        assert circuit_breakers.get(config, "healthz").settings.max_probes == 2
        background().run(caller.close())
    environ = {
        "TINKEX_CIRCUIT_BREAKER_FAILURES": "7",
        "TINKEX_CIRCUIT_BREAKER_COOLDOWN": "0.5",
        "TINKEX_CIRCUIT_BREAKER_PROBES": "3",
    }
    read = Config.resolve(environ=environ, needs_key=False)
    assert (read.circuit_breaker_failures, read.circuit_breaker_cooldown) == (7, 0.5)
    assert read.circuit_breaker_probes == 3
    for name in environ:
        with pytest.raises(ConfigError, match=name):
            Config.resolve(environ={name: "0"}, needs_key=False)


class Raising(RecordingSink):
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
    registry = BreakerRegistry(clock=clock)
    url, raises = "http://mock.invalid", what == "a sink that raises"
    config = Config(api_key="tml-test", base_url=url, circuit_breaker_failures=1)
    breaker = registry.get(config, "healthz")
    received: RecordingSink = Raising() if raises else RecordingSink()
    asked = asyncio.Event()

    async def never(request: Request) -> Reply:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    caller = Caller(
        MockTransport(never),
        config,
        sink=received,
        policy=NO_RETRIES,
        circuit=Circuit(config, registry, received),
    )
    fail(breaker)
    clock.now += 100.0
    assert breaker.state() == "half_open"
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
    assert circuit_of(SharedHttp(on), on, RecordingSink()) is not None
    assert circuit_of(SharedHttp(off), off, RecordingSink()) is None
    assert circuit_of(LocalTransport(), on, RecordingSink()) is None
    assert not Config.resolve(environ={"TINKEX_CIRCUIT_BREAKER": "0"}, needs_key=False).circuit_breaker


@pytest.mark.slow
def test_a_forked_child_finds_out_for_itself_even_if_the_parent_was_just_writing() -> None:
    program = """
import os
from tinkex import Config, circuit_breakers
from tinkex._transport.circuit import Circuit
from tinkex._wire.endpoints import endpoint
from tinkex.errors import APIConnectionError, CircuitOpenError
from tinkex.observability.events import NullSink
config = Config(api_key="tml-x", base_url="http://a")
circuit = Circuit(config, circuit_breakers, NullSink())
def refused():
    error = APIConnectionError(None, "refused")
    error.__cause__ = ConnectionRefusedError()
    circuit.enter(endpoint("healthz"), None).failed(error)
for _ in range(5):
    refused()
with circuit_breakers._lock, circuit.connection._lock:
    child = os.fork()
    if child == 0:
        circuit.enter(endpoint("healthz"), None).end()
        os._exit(0 if circuit_breakers.state("http://a") == "closed" else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert circuit_breakers.state("http://a") == "open"
try:
    refused()
except CircuitOpenError:
    pass
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
