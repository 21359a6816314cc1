"""The reporter against a real socket: what is sent, what never is, and that nothing ever waits for it."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tinkex
from tests.recording import Recorder
from tests.scripted import ScriptedServer, over_http
from tinkex import Config, ServiceClient, types
from tinkex._runtime import background
from tinkex._transport.breaker import DEFAULTS
from tinkex._transport.caller import Caller
from tinkex.errors import APIStatusError, HttpResponse, InternalServerError
from tinkex.observability import telemetry
from tinkex.observability.events import (
    CircuitChanged,
    Event,
    HeartbeatLost,
    LogSink,
    NullSink,
    TelemetryDataDropped,
)
from tinkex.observability.telemetry import Reporter, TelemetrySink, capture
from tinkex.observability.telemetry.reporter import (
    DRAIN_TIMEOUT_S,
    INTERVAL_S,
    MAX_BATCH_SIZE,
    MAX_QUEUE_SIZE,
)
from tinkex.testing import Reply, Request, reply

KEY = "tml-secret-0123456789"
SRC = Path(tinkex.__file__).parent


class Collector(ScriptedServer):
    """Takes telemetry in; ``held`` makes it wait with its answer."""

    def __init__(self, status: int = 200) -> None:
        super().__init__()
        self.batches: list[types.TelemetrySendRequest] = []
        self.bodies: list[bytes] = []
        self.status = status
        self.may_answer = threading.Event()
        self.may_answer.set()

    def on_telemetry(self, value: types.TelemetrySendRequest, request: Request) -> Reply:
        self.may_answer.wait(30)
        self.batches.append(value)
        self.bodies.append(request.body)
        return reply({"status": "accepted"} if self.status == 200 else {"detail": "no"}, self.status)

    @property
    def events(self) -> list[dict[str, Any]]:
        return [event for batch in self.batches for event in batch.events]

    @property
    def names(self) -> list[str]:
        return [event.get("event_name") or event["event"] for event in self.events]


def service_of(url: str, **settings: Any) -> ServiceClient:
    service = ServiceClient(config=Config(api_key=KEY, base_url=url, **settings), events=NullSink())
    service.create_sampling_client(base_model="toy")  # opens the session
    return service


def reporter_of(service: ServiceClient) -> Reporter:
    reporter = service.get_telemetry()
    assert reporter is not None
    return reporter


def test_events_go_out_in_order_in_batches_with_the_session_around_them() -> None:
    collector = Collector()
    with over_http(collector) as url, service_of(url) as service:
        reporter = reporter_of(service)
        for number in range(2 * MAX_BATCH_SIZE):
            assert reporter.log("tick", {"step": number})
        assert reporter.wait_until_drained(30)
    assert collector.names == ["SESSION_START", *["tick"] * (2 * MAX_BATCH_SIZE), "SESSION_END"]
    assert [event["event_session_index"] for event in collector.events] == list(range(2 * MAX_BATCH_SIZE + 2))
    assert max(len(batch.events) for batch in collector.batches) <= MAX_BATCH_SIZE
    assert {batch.session_id for batch in collector.batches} == {"sess-1"}
    assert [e["event_data"]["step"] for e in collector.events if e.get("event_data")] == list(
        range(2 * MAX_BATCH_SIZE)
    )


def test_a_first_event_that_is_rejected_does_not_keep_later_ones_from_being_sent() -> None:
    collector = Collector()
    with over_http(collector) as url, service_of(url) as service:
        reporter = reporter_of(service)
        with pytest.raises(ValueError, match="severity"):
            reporter.log("tick", severity="LOUD")  # type: ignore[arg-type]
        assert reporter.log("tick")
        assert reporter.wait_until_drained(30)
    assert collector.names == ["SESSION_START", "tick", "SESSION_END"]
    assert [event["event_session_index"] for event in collector.events] == [0, 1, 2]


@pytest.mark.parametrize("all_requests", [False, True])
def test_failed_requests_are_reported_and_all_of_them_if_the_setting_says_so(all_requests: bool) -> None:
    collector = Collector()
    collector.answers["get_sampler"] = lambda value, request: reply({"detail": "no such sampler"}, 404)
    with over_http(collector) as url, service_of(url, telemetry_requests=all_requests) as service:
        rest = service.create_rest_client()
        service.get_server_capabilities()
        with pytest.raises(tinkex.NotFoundError):
            rest.get_sampler("s").result()
        assert reporter_of(service).wait_until_drained(30)
        collector.answers["telemetry"] = lambda value, request: reply({"detail": "no"}, 400)
        reporter_of(service).log("lost")
        reporter_of(service).wait_until_drained(30)
    requests = [e for e in collector.events if e.get("event_name") == "tinkex.RequestFinished"]
    by_name = {event["event_data"]["endpoint"]: event for event in requests}
    assert set(by_name) >= {"get_sampler"} | ({"get_server_capabilities"} if all_requests else set())
    assert ("get_server_capabilities" in by_name) is all_requests
    assert "telemetry" not in by_name
    failed = by_name["get_sampler"]
    assert failed["severity"] == "WARNING"
    assert failed["event_data"]["status"] == 404
    assert set(failed["event_data"]) == {"endpoint", "attempt", "status", "elapsed_s"}


def test_a_reporter_that_is_stopped_has_sent_everything_and_takes_nothing_more() -> None:
    collector = Collector()
    with over_http(collector) as url, service_of(url) as service:
        reporter = reporter_of(service)
        assert reporter.log("tick")
        assert reporter.stop(30) is True
        assert collector.names == ["SESSION_START", "tick", "SESSION_END"]
        assert reporter.log("tock") is False
        assert reporter.stop() is True
        assert service.get_server_capabilities().model_names() == ["toy"]  # the client keeps working
    assert collector.names == ["SESSION_START", "tick", "SESSION_END"]


def test_stopping_a_reporter_does_not_wait_for_ever() -> None:
    collector = Collector()
    with over_http(collector) as url, service_of(url) as service:
        collector.may_answer.clear()
        reporter = reporter_of(service)
        reporter.log("tick")
        began = time.monotonic()
        assert reporter.stop(0.05) is False
        assert time.monotonic() - began < 10
        collector.may_answer.set()


def test_the_bounds_are_those_that_are_documented() -> None:
    assert (MAX_BATCH_SIZE, INTERVAL_S, MAX_QUEUE_SIZE, DRAIN_TIMEOUT_S) == (100, 10.0, 10_000, 2.0)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def eagerly(service: ServiceClient, interval_s: float) -> Reporter:
    """A reporter of the service's session that sends at another pace."""
    return Reporter(service.holder.caller, service.holder.get_session_id(), interval_s=interval_s)


def test_what_is_less_than_a_batch_goes_out_by_itself_after_a_while() -> None:
    collector = Collector()
    with over_http(collector) as url, service_of(url) as service:
        reporter = eagerly(service, interval_s=0.02)
        for number in range(1, 4):
            reporter.log("tick")
            wait_for(lambda number=number: collector.names.count("tick") == number)  # nothing asks for it
        background().run(reporter.close())
    assert collector.names == ["SESSION_START", "tick", "tick", "tick", "SESSION_END"]
    assert len(collector.batches) == 4


def test_waiting_has_the_queue_sent_immediately_however_long_the_interval_is() -> None:
    collector = Collector()
    with over_http(collector) as url, service_of(url) as service:
        reporter = eagerly(service, interval_s=1e6)
        reporter.log("tick")
        assert reporter.wait_until_drained(30)
        assert collector.names == ["SESSION_START", "tick"]
        background().run(reporter.close())


def test_waiting_ends_in_time_when_the_server_does_not_answer() -> None:
    collector = Collector()
    collector.may_answer.clear()
    with over_http(collector) as url, service_of(url) as service:
        reporter_of(service).log("tick")
        assert not reporter_of(service).wait_until_drained(0.05)
        collector.may_answer.set()
        assert reporter_of(service).wait_until_drained(30)


def test_however_often_it_is_flushed_there_is_one_sender() -> None:
    collector = Collector()
    with over_http(collector) as url, service_of(url) as service:
        reporter = reporter_of(service)
        for _ in range(5):
            for _ in range(MAX_BATCH_SIZE):
                reporter.log("tick")
            reporter.flush()
        assert reporter.wait_until_drained(30)

        async def tasks_of_it() -> int:
            frames = [getattr(task.get_coro(), "cr_frame", None) for task in asyncio.all_tasks()]
            return sum(frame is not None and frame.f_locals.get("self") is reporter for frame in frames)

        assert background().run(tasks_of_it()) == 1


@pytest.mark.slow
def test_one_reporter_serves_all_clients_of_a_session_until_it_ends() -> None:
    collector = Collector()
    with over_http(collector) as url, service_of(url) as service:
        reporter = reporter_of(service)
        first = service.create_lora_training_client("toy")
        second = service.create_lora_training_client("toy")
        sampler = service.create_sampling_client(base_model="toy")
        assert {id(c.get_telemetry()) for c in (first, second, sampler)} == {id(reporter)}
        first.unload().result()
        del first, sampler
        gc.collect()
        with pytest.raises(RuntimeError), capture(second, fatal=True):
            raise RuntimeError("of one client")
        assert reporter.log("still here")
        assert reporter.wait_until_drained(30)
        assert "SESSION_END" not in collector.names
    assert collector.names == ["SESSION_START", "UNHANDLED_EXCEPTION", "still here", "SESSION_END"]


def test_a_fatal_exception_is_raised_immediately_whatever_the_server_does() -> None:
    collector = Collector()
    collector.may_answer.clear()
    with over_http(collector) as url, service_of(url) as service:
        with pytest.raises(RuntimeError, match="boom"), capture(service, fatal=True):
            raise RuntimeError("boom")
        assert collector.batches == []  # nobody has waited for an answer
        collector.may_answer.set()


def test_every_module_of_telemetry_is_used() -> None:
    sources = {path: path.read_text() for path in SRC.rglob("*.py")}
    for module in (SRC / "telemetry").glob("[!_]*.py"):
        name = f"tinkex.observability.telemetry.{module.stem}"
        assert any(f"from {name} import" in text for path, text in sources.items() if path != module), name


def test_a_session_with_nothing_to_report_sends_nothing() -> None:
    collector = Collector()
    with over_http(collector) as url, service_of(url):
        pass
    assert collector.batches == []


def test_nothing_is_reported_where_that_was_ruled_out_or_no_network_is_on_the_way() -> None:
    collector = Collector()
    with over_http(collector) as url, service_of(url, telemetry=False) as service:
        assert service.get_telemetry() is None
    with ServiceClient(transport=collector.transport) as service:
        service.create_sampling_client(base_model="toy")
        assert service.get_telemetry() is None
    off = Config.resolve(environ={"TINKER_TELEMETRY": "0"}, needs_key=False)
    assert not off.telemetry


def test_the_program_s_own_data_arrives_without_secrets_and_texts_of_errors_do_not_arrive() -> None:
    collector = Collector()
    with over_http(collector) as url, service_of(url) as service:
        reporter = reporter_of(service)
        reporter.log(
            "mine", {"step": 1, "phase": "warm up", "where": f"key {KEY}", "status": [1], "loss": 0.5}
        )
        with pytest.raises(RuntimeError), capture(service):
            raise RuntimeError(f"private words and {KEY}")
        sink = TelemetrySink(reporter)
        sink.emit(CircuitChanged("http://private.host", "train", "open", "private words", "optim_step"))
        sink.emit(HeartbeatLost("private words", 130.0))
        assert reporter.wait_until_drained(30)
    sent = b"".join(collector.bodies)
    assert b"private" not in sent
    assert KEY.encode() not in sent
    by_name = {event.get("event_name") or event["event"]: event for event in collector.events}
    assert by_name["mine"]["event_data"] == {
        "step": 1,
        "phase": "warm up",
        "where": "key …",
        "loss": 0.5,
        "dropped_fields": "status",
    }
    assert by_name["tinkex.CircuitChanged"]["event_data"] == {
        "purpose": "train",
        "endpoint": "optim_step",
        "state": "open",
    }
    assert by_name["tinkex.HeartbeatLost"]["event_data"] == {"silent_s": 130.0}
    assert by_name["UNHANDLED_EXCEPTION"]["error_type"] == "builtins.RuntimeError"
    assert "1 frames of other code" in by_name["UNHANDLED_EXCEPTION"]["traceback"]


def test_what_is_not_sent_is_an_event_and_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder()
    caller = Caller(ScriptedServer().transport, Config(api_key=KEY, base_url="http://mock"), sink=recorder)
    reporter = Reporter(caller, "sess-1", interval_s=1e6)
    assert reporter.log("mine", {"prompt": "x" * 201, "nested": {"a": 1}, "fine": True})
    assert recorder.events == [TelemetryDataDropped("mine", ("prompt", "nested"))]
    assert reporter.log("mine", {"fine": 1})
    assert len(recorder.events) == 1
    LogSink().emit(recorder.events[0])
    assert "'prompt', 'nested' are not sent" in caplog.text
    background().run(reporter.close())


def test_errors_of_the_user_are_distinguished() -> None:
    collector = Collector()
    with over_http(collector) as url, service_of(url) as service:

        @capture(service)
        def ask() -> None:
            raise APIStatusError("no such run", HttpResponse(404))

        @capture(service)
        async def ask_async() -> None:
            raise APIStatusError("down", HttpResponse(503))

        with pytest.raises(APIStatusError, match="no such run"):
            ask()
        with pytest.raises(APIStatusError, match="down"):
            background().run(ask_async())
        assert reporter_of(service).wait_until_drained(30)
    assert collector.names == ["SESSION_START", "user_error", "UNHANDLED_EXCEPTION", "SESSION_END"]
    assert collector.events[1]["event_data"] == {"error_type": "APIStatusError", "status_code": 404}
    assert collector.events[2]["error_message"] == "status 503"


def test_an_unresponsive_server_delays_no_caller_and_a_full_queue_drops_events() -> None:
    collector = Collector()
    collector.may_answer.clear()
    with over_http(collector) as url:
        service = service_of(url)
        reporter = reporter_of(service)
        accepted = [reporter.log("tick") for _ in range(MAX_QUEUE_SIZE + 2 * MAX_BATCH_SIZE + 1)]
        assert accepted[0]
        assert not accepted[-1]
        assert reporter.num_dropped > 0
        service.close("success")  # bounded, whatever the server does
        assert not reporter.log("late")
        collector.may_answer.set()


def test_reports_end_when_a_server_rejects_telemetry() -> None:
    collector = Collector(status=404)
    with over_http(collector) as url, service_of(url) as service:
        reporter = reporter_of(service)
        reporter.log("tick")
        assert not reporter.wait_until_drained(30)  # it is gone, and it did not arrive
        assert reporter.num_dropped == 2
        assert len(collector.batches) == 1
        collector.status = 200
        reporter.log("tick")
        assert reporter.wait_until_drained(30)


class Mischievous(Exception):
    @property
    def status_code(self) -> int:
        raise RuntimeError("a mistake in somebody's exception")


class Talkative(Exception):
    status_code = "private words"


class NoTelemetry:
    def get_telemetry(self) -> None:
        raise RuntimeError("a mistake in somebody's client")


def test_whatever_an_exception_says_about_itself_it_is_raised_as_it_is() -> None:
    collector = Collector()
    with over_http(collector) as url, service_of(url) as service:
        for error in (Mischievous(), Talkative()):
            with pytest.raises(type(error)), capture(service):
                raise error
        with pytest.raises(ValueError, match="mine"), capture(NoTelemetry()):
            raise ValueError("mine")
        assert reporter_of(service).wait_until_drained(30)
    reported = [event for event in collector.events if event["event"] == "UNHANDLED_EXCEPTION"]
    assert [event["error_message"] for event in reported] == ["", ""]
    assert b"private" not in b"".join(collector.bodies)


def test_what_could_never_be_reported_is_rejected_where_it_is_written() -> None:
    with pytest.raises(TypeError, match="pass your ServiceClient"):
        capture("http://127.0.0.1")  # type: ignore[arg-type]

    def batches() -> Iterator[int]:
        yield 1

    async def events() -> AsyncIterator[int]:
        yield 1

    for generator in (batches, events):
        with pytest.raises(TypeError, match="is a generator"):
            capture(None)(generator)


class ForeignError(Exception):
    """An error of another HTTP library."""

    def __init__(self, status_code: object) -> None:
        super().__init__(status_code)
        self.status_code = status_code


def chain(error: Exception, cause: BaseException) -> Exception:
    error.__cause__ = cause
    return error


def cycle() -> Exception:
    first, second = RuntimeError("first"), RuntimeError("second")
    first.__cause__, second.__cause__ = second, first
    return first


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (tinkex.BadRequestError("no", HttpResponse(400)), True),
        (tinkex.APIStatusError("slow", HttpResponse(408)), False),
        (tinkex.RateLimitError("slow", HttpResponse(429)), False),
        (tinkex.InternalServerError("no", HttpResponse(500)), False),
        (tinkex.InternalServerError("no", HttpResponse(500), {"category": "user"}), True),
        (ForeignError(404), True),
        (ForeignError(429), False),
        (ForeignError("404"), False),
        (chain(RuntimeError("outer"), ForeignError(403)), True),
        (chain(tinkex.InternalServerError("no", HttpResponse(502)), ForeignError(403)), True),
        (cycle(), False),
    ],
)
def test_exceptions_are_classified_by_status_and_category_along_their_causes(
    error: Exception, expected: bool
) -> None:
    assert telemetry.is_user_error(error) is expected
    collector = Collector()
    with over_http(collector) as url, service_of(url) as service:
        reporter_of(service).log_exception(error, "DEBUG")
        assert reporter_of(service).wait_until_drained(30)
    (reported,) = [
        event for event in collector.events if event["event"] in ("GENERIC_EVENT", "UNHANDLED_EXCEPTION")
    ]
    assert (reported.get("event_name"), reported["severity"]) == (
        ("user_error", "WARNING") if expected else (None, "DEBUG")
    )


def test_waiting_without_end_is_allowed() -> None:
    collector = Collector()
    with over_http(collector) as url, service_of(url) as service:
        reporter_of(service).log("tick")
        assert reporter_of(service).wait_until_drained(math.inf)
        step = service.create_lora_training_client("toy").optim_step(types.AdamParams())
        assert step.result(math.inf).metrics


def test_a_report_that_cannot_be_sent_is_counted_and_does_not_end_those_after_it() -> None:
    collector = Collector()
    with over_http(collector) as url, service_of(url) as service:
        reporter = reporter_of(service)
        reporter.log("a lone surrogate \ud83d")
        assert reporter.wait_until_drained(30)
        strange = type("Strange", (Exception,), {"__module__": "\ud83d"})  # UTF-8 cannot encode this name
        reporter.log_exception(strange())
        assert not reporter.wait_until_drained(30)
        assert reporter.num_dropped == 1
        reporter.log("after it")
        assert reporter.wait_until_drained(30)
    assert collector.names == ["SESSION_START", "a lone surrogate ?", "after it", "SESSION_END"]


@pytest.mark.slow
def test_a_forked_child_reports_for_itself_and_nothing_of_its_parents_twice() -> None:
    program = """
import os, sys, tinkex
service = tinkex.ServiceClient(base_url=sys.argv[1], api_key="tml-x")
service.create_sampling_client(base_model="toy")
reporter = service.get_telemetry()
reporter.log("parent")
child = os.fork()
if child == 0:
    sent = reporter.log("child") and reporter.wait_until_drained(30)
    os._exit(0 if sent else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
reporter.log("parent again")
assert reporter.wait_until_drained(30)
os._exit(0)
"""
    collector = Collector()
    with over_http(collector) as url:
        environment = {name: value for name, value in os.environ.items() if name != "TINKER_TELEMETRY"}
        ended = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", program, url],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert ended.returncode == 0, ended.stderr
    reports = {batch.process_uuid: [] for batch in collector.batches}
    for batch in collector.batches:
        reports[batch.process_uuid] += [event.get("event_name") or event["event"] for event in batch.events]
    assert sorted(reports.values()) == [
        ["SESSION_START", "child"],
        ["SESSION_START", "parent", "parent again"],
    ]


def test_the_users_own_sink_receives_every_event_as_before() -> None:
    received: list[Event] = []

    class RecordingSink:
        def emit(self, event: Event) -> None:
            received.append(event)

    with over_http(Collector()) as url:
        config = Config(api_key=KEY, base_url=url)
        with ServiceClient(config=config, events=RecordingSink()) as service:
            service.create_sampling_client(base_model="toy")
    assert {type(event).__name__ for event in received} >= {
        "SessionOpened",
        "RequestFinished",
        "SessionClosed",
    }


def test_a_batch_is_what_the_protocol_says() -> None:
    collector = Collector()
    with over_http(collector) as url, service_of(url) as service:
        reporter_of(service).log("tick", severity="WARNING")
        assert reporter_of(service).wait_until_drained(30)
    body = json.loads(collector.bodies[0])
    assert set(body) == {"events", "platform", "sdk_version", "session_id", "process_uuid"}
    tick = body["events"][1]
    assert (tick["event"], tick["severity"]) == ("GENERIC_EVENT", "WARNING")
    assert tick["timestamp"].endswith("Z") or "+00:00" in tick["timestamp"]


@pytest.mark.slow
def test_a_program_that_ends_by_an_exception_reports_it_on_its_way_out() -> None:
    program = """
import sys, tinkex
from tinkex.observability.telemetry import capture
service = tinkex.ServiceClient(base_url=sys.argv[1], api_key="tml-x")
service.create_sampling_client(base_model="toy")
with capture(service, fatal=True):
    raise RuntimeError("boom")
"""
    collector = Collector()
    with over_http(collector) as url:
        environment = {name: value for name, value in os.environ.items() if name != "TINKER_TELEMETRY"}
        ended = subprocess.run(
            [sys.executable, "-c", program, url], env=environment, capture_output=True, text=True, check=False
        )
    assert ended.stderr.strip().endswith("RuntimeError: boom")
    assert collector.names == ["SESSION_START", "UNHANDLED_EXCEPTION"]
    assert collector.events[1]["severity"] == "CRITICAL"


@pytest.mark.slow
def test_a_program_ends_although_the_server_never_takes_its_reports() -> None:
    program = """
import sys, tinkex
service = tinkex.ServiceClient(base_url=sys.argv[1], api_key="tml-x")
service.create_sampling_client(base_model="toy")
assert service.get_telemetry().log("tick")
"""
    collector = Collector()
    collector.may_answer.clear()
    with over_http(collector) as url:
        environment = {name: value for name, value in os.environ.items() if name != "TINKER_TELEMETRY"}
        ended = subprocess.run(
            [sys.executable, "-c", program, url],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        collector.may_answer.set()
    assert ended.returncode == 0, ended.stderr


def test_a_circuit_that_opens_is_reported() -> None:
    collector = Collector()
    collector.on_get_server_capabilities = lambda value, request: reply({"detail": "down"}, 503)  # type: ignore[attr-defined]
    with over_http(collector) as url, service_of(url, max_retries=0) as service:
        for _ in range(DEFAULTS.failure_threshold):
            with pytest.raises(InternalServerError):
                service.get_server_capabilities()
        assert reporter_of(service).wait_until_drained(30)
    changed = [event for event in collector.events if event.get("event_name") == "tinkex.CircuitChanged"]
    assert [event["event_data"]["state"] for event in changed] == ["open"]


def test_a_report_that_was_lost_before_the_first_wait_counts_as_lost() -> None:
    collector = Collector(status=400)
    with over_http(collector) as url, service_of(url) as service:
        reporter = reporter_of(service)
        reporter.log_exception(RuntimeError(), fatal=True)  # sent without being waited for
        deadline = time.monotonic() + 30
        while reporter.num_dropped < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert not reporter.wait_until_drained(30)
        assert reporter.wait_until_drained(30), "nothing was reported since"
