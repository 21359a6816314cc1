"""Clients share one event loop: a callback of one that blocks delays no other, and a loop that stops is replaced."""

from __future__ import annotations

import asyncio
import ctypes
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest

from tests.scripted import ScriptedServer, over_http
from tinkex import Config, SamplingClient, ServiceClient, types
from tinkex._runtime import background
from tinkex._transport.caller import Caller
from tinkex._transport.http import HttpTransport
from tinkex._transport.shared import SharedHttp
from tinkex.clients.session import Session
from tinkex.errors import LoopStoppedError, TinkexError
from tinkex.observability import process
from tinkex.observability.events import CallbackFailed, Event, NullSink, RequestFinished, RequestStarted
from tinkex.testing import Reply, Request, reply

PROMPT = types.ModelInput.from_ints([1, 2, 3])
PARAMS = types.SamplingParams(max_tokens=3)


class RecordingSink:
    def __init__(self) -> None:
        self.events: list[Event] = []
        self.threads: set[str] = set()

    def emit(self, event: Event) -> None:
        self.threads.add(threading.current_thread().name)
        self.events.append(event)


class BlockingSink(RecordingSink):
    """Blocks at its first event until the test releases it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocked, self.release = threading.Event(), threading.Event()

    def emit(self, event: Event) -> None:
        self.blocked.set()
        assert self.release.wait(60)
        super().emit(event)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@contextmanager
def client(server: ScriptedServer | None = None, events: Any = None) -> Iterator[SamplingClient]:
    transport = (server or ScriptedServer()).transport
    with ServiceClient(transport=transport, events=events or NullSink()) as service:
        yield service.create_sampling_client(base_model="toy")


def sample(sampler: SamplingClient) -> types.SampleResponse:
    return sampler.sample(PROMPT, 1, PARAMS).result(timeout=30)


# ---- callbacks ----


@pytest.mark.slow
def test_a_sink_that_blocks_delays_no_other_client_and_its_own_only_shortly() -> None:
    sink = BlockingSink()
    with client() as other, ServiceClient(transport=ScriptedServer().transport, events=sink) as service:
        sampler = service.create_sampling_client(base_model="toy")  # although its sink is blocked
        assert sink.blocked.is_set()
        for _ in range(3):
            sample(sampler)
            sample(other)
        assert sink.events == [], "it is still blocked"
        sink.release.set()
        until(lambda: len([e for e in sink.events if isinstance(e, RequestFinished)]) >= 9)


@pytest.mark.slow
def test_a_sink_of_the_process_that_blocks_delays_no_client() -> None:
    sink = BlockingSink()
    process.attach(sink)
    try:
        with client() as sampler:
            sample(sampler)
            assert sink.events == []
    finally:
        sink.release.set()
        process.detach(sink)
    assert sink.events, "those before it was detached"


@pytest.mark.slow
def test_the_first_result_waits_for_the_sink_of_its_client_and_hardly_for_one_of_the_process() -> None:
    def seconds_of_a_sample(sampler: SamplingClient, blocked: BlockingSink) -> float:
        began = time.monotonic()
        try:
            sample(sampler)
            return time.monotonic() - began
        finally:
            blocked.release.set()
            process.detach(blocked)

    own = BlockingSink()
    own.release.set()  # opening the session does not wait
    with client(events=own) as sampler:
        own.release.clear()
        with_own = seconds_of_a_sample(sampler, own)
    with_shared = list[float]()
    for _ in range(3):
        with client() as sampler:
            shared = BlockingSink()
            process.attach(shared)
            with_shared.append(seconds_of_a_sample(sampler, shared))
    assert min(with_shared) < with_own


def test_events_arrive_in_order_and_before_the_result() -> None:
    sink = RecordingSink()
    with client(events=sink) as sampler:
        for _ in range(20):
            before = len(sink.events)
            sample(sampler)
            new = sink.events[before:]
            assert [(type(event), getattr(event, "endpoint", None)) for event in new] == [
                (RequestStarted, "asample"),
                (RequestFinished, "asample"),
                (RequestStarted, "retrieve_future"),
                (RequestFinished, "retrieve_future"),
            ]
    assert sink.threads == {"tinkex callbacks"}


@pytest.mark.slow
def test_a_queue_observer_that_blocks_delays_no_other_client() -> None:
    paused = {"type": "try_again", "queue_state": "paused_capacity", "retry_after_ms": 1}
    answers = [reply(paused)]
    server = ScriptedServer()
    server.answers["retrieve_future"] = lambda value, request: (
        answers.pop() if answers else server.on_retrieve_future(value, request)
    )
    blocked, release = threading.Event(), threading.Event()
    states: list[tuple[str, str]] = []

    def observe(state: str, reason: str | None) -> None:
        blocked.set()
        assert release.wait(60)
        states.append((state, threading.current_thread().name))

    with client(server) as sampler, client() as other:
        sampler.queue_state_observer = observe
        future = sampler.sample(PROMPT, 1, PARAMS)
        assert blocked.wait(30)
        sample(other)
        future.result(timeout=30)
        release.set()
        until(lambda: states == [("paused_capacity", "tinkex callbacks")])


def test_a_done_callback_that_blocks_delays_no_other_client() -> None:
    hold, held = threading.Event(), asyncio.Event()
    server = ScriptedServer()

    async def answer(value: types.FutureRetrieveRequest, request: Request) -> Reply:
        if not hold.is_set():
            await held.wait()
        return server.on_retrieve_future(value, request)

    server.answers["retrieve_future"] = answer
    blocked, release = threading.Event(), threading.Event()

    def block(_: Future[Any]) -> None:
        blocked.set()
        assert release.wait(60)

    called: list[int] = []
    with client(server) as sampler, client() as other:
        first, second, third = (sampler.sample(PROMPT, 1, PARAMS) for _ in range(3))
        first.add_done_callback(block)
        second.add_done_callback(lambda _: called.append(2))
        third.add_done_callback(lambda _: called.append(3))
        hold.set()
        background().loop.call_soon_threadsafe(held.set)
        assert blocked.wait(30)
        sample(other)
        assert [len(one.result(timeout=30).sequences) for one in (first, second, third)] == [1, 1, 1]
        sample(sampler)
        release.set()
        until(lambda: sorted(called) == [2, 3])


def test_a_done_callback_may_call_its_client_and_wait_for_another() -> None:
    done: Future[types.SampleResponse] = Future()
    own: list[Future[types.SampleResponse]] = []

    def follow_up(_: Future[Any]) -> None:
        own.append(sampler.sample(PROMPT, 1, PARAMS))
        done.set_result(sample(other))

    with client(events=RecordingSink()) as sampler, client() as other:
        sampler.sample(PROMPT, 1, PARAMS).add_done_callback(follow_up)
        assert len(done.result(timeout=30).sequences) == 1
        assert len(own[0].result(timeout=30).sequences) == 1


def test_a_done_callback_that_raises_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: Future[Any]) -> None:
        raise LookupError("a mistake")

    with client() as sampler:
        future = sampler.sample(PROMPT, 1, PARAMS)
        future.add_done_callback(fail)
        future.result(timeout=30)
        if (
            future.done()
        ):  # it may have been done before the callback was added, which concurrent.futures logs
            until(lambda: "a mistake" in caplog.text)


@pytest.mark.slow
def test_a_client_without_callbacks_has_one_thread() -> None:
    program = """
import threading
from tests.scripted import ScriptedServer
from tests.unit.clients.test_isolation import PARAMS, PROMPT
import tinkex
with tinkex.ServiceClient(transport=ScriptedServer().transport) as service:
    sampler = service.create_sampling_client(base_model="toy")
    sampler.sample(PROMPT, 1, PARAMS).result(timeout=30)
    names = sorted(thread.name for thread in threading.enumerate())
assert names == ["MainThread", "tinkex"], names
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.slow
def test_a_program_that_ends_still_delivers_its_last_events() -> None:
    program = """
import time
from tinkex._runtime import background
from tinkex.observability.callbacks import queued
from tinkex.observability.events import SessionOpened
class Sink:
    def emit(self, event):
        time.sleep(0.1)
        print(event.session_id, flush=True)
background()
sink = queued(Sink())
for name in "abc":
    sink.emit(SessionOpened(name))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, timeout=60, capture_output=True, text=True
    )
    assert (done.stdout.split(), done.stderr) == (["a", "b", "c"], "")


# ---- a loop that stops ----


def stop_by_a_callback() -> None:
    old = background()
    old.loop.call_soon_threadsafe(old.loop.stop)
    until(lambda: old.failure is not None)


def end_the_thread() -> None:
    """Raises an exception in the loop itself, outside of every callback."""

    async def identify() -> int:
        return threading.get_ident()

    old = background()
    ident = old.run(identify())
    thread = next(each for each in threading.enumerate() if each.ident == ident)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(MemoryError))
    old.loop.call_soon_threadsafe(lambda: None)
    thread.join(timeout=30)  # pytest reports its exception with the test in which it ends
    assert not thread.is_alive()


@pytest.fixture
def holding() -> ScriptedServer:
    """A server whose results take for ever, until ``answers`` is cleared."""

    async def hold(value: types.FutureRetrieveRequest, request: Request) -> Reply:
        await asyncio.Event().wait()
        raise AssertionError

    return ScriptedServer(retrieve_future=hold)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("stop", [stop_by_a_callback, end_the_thread])
def test_pending_calls_fail_when_the_loop_stops_and_the_next_call_starts_a_new_one(
    holding: ScriptedServer, stop: Callable[[], None]
) -> None:
    with ServiceClient(transport=holding.transport, events=NullSink()) as service:
        sampler = service.create_sampling_client(base_model="toy")
        pending = [sampler.sample(PROMPT, 1, PARAMS) for _ in range(3)]
        until(lambda: holding.names().count("retrieve_future") == 3)
        old = background()
        stop()
        for future in pending:
            with pytest.raises(LoopStoppedError, match="starts a new loop"):
                future.result(timeout=30)
        assert issubclass(LoopStoppedError, TinkexError)
        holding.answers.clear()
        assert len(sample(sampler).sequences) == 1
        assert background() is not old
        training = service.create_lora_training_client("toy")
        training.optim_step(types.AdamParams()).result(timeout=30)


def test_an_awaited_call_fails_when_the_loop_stops(holding: ScriptedServer) -> None:
    async def main(sampler: SamplingClient) -> None:
        sampling = asyncio.ensure_future(sampler.sample_async(PROMPT, 1, PARAMS))
        while "retrieve_future" not in holding.names():  # noqa: ASYNC110 - set by another thread
            await asyncio.sleep(0.002)
        stop_by_a_callback()
        async with asyncio.timeout(30):
            with pytest.raises(LoopStoppedError):
                await sampling

    with client(holding) as sampler:
        asyncio.run(main(sampler))
        holding.answers.clear()


def test_streams_are_disconnected_when_the_loop_stops() -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(30)
        transport = HttpTransport(
            Config(api_key="tml-test", base_url=f"http://127.0.0.1:{listening.getsockname()[1]}")
        )
        opening = background().submit(transport.stream(Request("GET", "/api/v1/healthz", timeout=30.0)))
        with listening.accept()[0] as accepted:
            accepted.settimeout(30)
            assert accepted.recv(65536).startswith(b"GET /api/v1/healthz")
            accepted.sendall(head)
            stream = opening.result(timeout=30)
            stop_by_a_callback()
            assert accepted.recv(65536) == b""
        assert stream.status == 200


def test_a_blocking_call_fails_when_the_loop_stops() -> None:
    async def hold(value: Any, request: Request) -> Reply:
        await asyncio.Event().wait()
        raise AssertionError

    server = ScriptedServer(get_server_capabilities=hold)
    with ServiceClient(transport=server.transport, events=NullSink()) as service:
        stopping = threading.Thread(target=lambda: (until(server.names), stop_by_a_callback()))
        stopping.start()
        with pytest.raises(LoopStoppedError):
            service.get_server_capabilities()
        stopping.join()
        server.answers.clear()
        assert service.get_server_capabilities().supported_models


def test_connections_heartbeats_and_telemetry_resume_on_the_new_loop() -> None:
    scripted = ScriptedServer(telemetry=lambda value, request: reply({"status": "accepted"}))
    with over_http(scripted) as url:
        config = Config(api_key="tml-x", base_url=url)
        session = Session(Caller(SharedHttp(config), config), heartbeat_interval_s=0.01)
        sampler = SamplingClient.create(session, base_model="toy").result(timeout=30)
        reporter = sampler.get_telemetry()
        assert reporter is not None
        for number in range(3):
            sample(sampler)
            beats = scripted.names().count("session_heartbeat")
            until(lambda beats=beats: scripted.names().count("session_heartbeat") >= beats + 2)  # type: ignore[misc]
            assert reporter.log("still here", {"number": number})
            assert reporter.wait_until_drained(30)
            stop_by_a_callback()
        background().run(session.finish("success"))
    numbers = [
        event["event_data"]["number"]
        for batch in scripted.values("telemetry")
        for event in batch.events
        if event.get("event_data")
    ]
    assert numbers == [0, 1, 2]


def test_a_failed_callback_does_not_stop_the_events() -> None:
    received = RecordingSink()

    class Failing:
        def emit(self, event: Event) -> None:
            received.emit(event)
            raise LookupError("a mistake")

    with client(events=Failing()) as sampler:
        sample(sampler)
    assert len(received.events) > 4
    assert not [event for event in received.events if isinstance(event, CallbackFailed)]
