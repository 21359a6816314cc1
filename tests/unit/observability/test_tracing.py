"""Spans of a client: one per operation, one per request, each in the trace of its caller."""

from __future__ import annotations

import asyncio
import contextvars
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

import pytest
from opentelemetry import baggage, context, trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from tests.scripted import ScriptedServer, over_http
from tests.traces import Traces, traced
from tests.unit.clients.test_streaming import ACCEPTED, DONE, StreamingServer, sse_reply, token
from tinkex import AdamParams, Config, RestClient, ServiceClient, TrainingClient, types
from tinkex._runtime import background, create_detached_task
from tinkex.clients.retry_config import RetryConfig
from tinkex.clients.sampling import SamplingClient
from tinkex.clients.session import Session
from tinkex.errors import APIConnectionError, NotFoundError, RequestFailedError, StreamInterruptedError
from tinkex.observability import tracing
from tinkex.observability.events import NullSink
from tinkex.testing import Reply, Request, reply

PROMPT = types.ModelInput.from_ints([1, 2, 3])
PARAMS = types.SamplingParams(max_tokens=4, temperature=0.5)
KEY = "tml-secret-0123456789"


@pytest.fixture
def traces() -> Iterator[Traces]:
    with traced() as found:
        yield found


def service_of(server: ScriptedServer, **settings: Any) -> ServiceClient:
    config = Config(api_key=KEY, base_url="http://host:8080", **settings)
    return ServiceClient(config=config, transport=server.transport, events=NullSink())


def training_of(server: ScriptedServer, **settings: Any) -> TrainingClient:
    return service_of(server, **settings).create_lora_training_client("toy", rank=8)


def sampler_of(server: ScriptedServer, **settings: Any) -> SamplingClient:
    quick = RetryConfig(retry_delay_base=0.01, retry_delay_max=0.02)
    return service_of(server, **settings).create_sampling_client(base_model="toy", retry_config=quick)


def datum(*tokens: int) -> types.Datum:
    given = types.ModelInput.from_ints(list(tokens))
    return types.Datum(model_input=given, loss_fn_inputs={"target_tokens": list(tokens)})


def facts(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def traceparents(server: ScriptedServer, path: str) -> list[str]:
    return [
        request.headers.get("traceparent", "")
        for request in server.transport.requests
        if request.path.endswith(path)
    ]


def named_by(headers: list[str]) -> list[tuple[int, int]]:
    """The traces and spans that headers name."""
    propagator = TraceContextTextMapPropagator()
    contexts = [propagator.extract({"traceparent": header}, context.Context()) for header in headers]
    found = [trace.get_current_span(each).get_span_context() for each in contexts]
    return [(each.trace_id, each.span_id) for each in found]


def ids(span: ReadableSpan) -> tuple[int, int]:
    return span.context.trace_id, span.context.span_id


class Failing:
    """Answers so many times with a status, and then as ever."""

    def __init__(self, server: ScriptedServer, name: str, status: int, times: int = 1) -> None:
        self._usual, self._status, self._left = getattr(server, f"on_{name}"), status, times
        server.answers[name] = self

    def __call__(self, value: Any, request: Request) -> Reply:
        if self._left > 0:
            self._left -= 1
            return reply({"detail": "private words"}, self._status, {"retry-after-ms": "1"})
        answer: Reply = self._usual(value, request)
        return answer


# ---- one operation ----


def test_an_operation_is_a_span_of_its_caller_and_every_request_one_of_it(traces: Traces) -> None:
    server = ScriptedServer()
    training = training_of(server)
    traces.clear()
    with traces.program.start_as_current_span("user code") as user:
        training.forward_backward([datum(1, 2, 3), datum(4, 5)], "cross_entropy").result()
    operation = traces.one("tinkex.forward_backward")
    assert operation.parent is not None
    assert operation.parent.span_id == user.get_span_context().span_id
    assert operation.status.status_code is StatusCode.UNSET
    assert facts(operation) == {
        "session.id": "sess-1",
        "tinkex.model_id": "sess-1:train:0",
        "tinkex.seq_ids": (1,),
        "tinkex.loss_fn": "cross_entropy",
        "tinkex.num_datums": 2,
        "tinkex.num_tokens": 5,
        "tinkex.num_requests": 1,
        "tinkex.request_ids": ("req-1",),
    }
    posted, polled = traces.inside(operation)
    assert [posted.name, polled.name] == ["POST /api/v1/forward_backward", "POST /api/v1/retrieve_future"]
    assert posted.kind is SpanKind.CLIENT
    assert facts(posted) == {
        "http.request.method": "POST",
        "url.template": "/api/v1/forward_backward",
        "server.address": "host",
        "server.port": 8080,
        "http.response.status_code": 200,
    }


def test_the_headers_of_a_request_name_its_own_span(traces: Traces) -> None:
    server = ScriptedServer()
    training = training_of(server)
    training.optim_step(AdamParams(learning_rate=0.5)).result()
    operation = traces.one("tinkex.optim_step")
    posted = traces.one("POST /api/v1/optim_step")
    assert posted.context.trace_id == operation.context.trace_id
    assert named_by(traceparents(server, "/optim_step")) == [ids(posted)]
    assert facts(operation)["tinkex.learning_rate"] == 0.5


class Proxied(ScriptedServer):
    """A server that is reached through itself as a proxy, by its whole address."""

    def handle(self, request: Request) -> Any:
        return super().handle(replace(request, path=urlsplit(request.path).path))


@pytest.mark.parametrize("transport", ["plain", "library"])
def test_every_transport_carries_the_headers(transport: str, traces: Traces) -> None:
    seen: list[str] = []

    def capabilities(value: Any, request: Request) -> Reply:
        seen.append(request.headers.get("traceparent", ""))
        return reply({"supported_models": []})

    with over_http(Proxied(get_server_capabilities=capabilities)) as url:
        proxy = (
            url if transport == "library" else None
        )  # with a proxy on the way it is the library that sends
        with ServiceClient(config=Config(api_key=KEY, base_url=url, proxy=proxy)) as service:
            service.get_server_capabilities()
    attempt = traces.one("GET /api/v1/get_server_capabilities")
    assert named_by(seen) == [ids(attempt)]


def test_baggage_travels_with_the_trace_and_headers_of_the_users_own_stand(traces: Traces) -> None:
    server = ScriptedServer()
    rest = RestClient(transport=server.transport, config=Config(default_headers={"Traceparent": "mine"}))
    held = context.attach(baggage.set_baggage("team", "green"))
    try:
        service_of(server).get_server_capabilities()
        rest.get_health().exception()
    finally:
        context.detach(held)
    (first, *_) = server.transport.requests
    assert first.headers["baggage"] == "team=green"
    assert server.transport.requests[-1].headers["traceparent"] == "mine"


def test_what_is_done_inside_of_an_operation_is_part_of_it(traces: Traces) -> None:
    service = service_of(ScriptedServer())
    service.create_training_client_from_state_with_optimizer("tinker://sess-1:train:0/weights/a")
    operation = traces.one("tinkex.create_training_client_from_state_with_optimizer")
    assert [span.name for span in traces.inside(operation)] == [
        "POST /api/v1/weights_info",
        "POST /api/v1/client/config",
        "POST /api/v1/client/dynamic_config",
        "POST /api/v1/create_session",
        "POST /api/v1/create_model",
        "POST /api/v1/retrieve_future",
        "tinkex.load_state",
    ]
    assert {span.context.trace_id for span in traces.spans} == {operation.context.trace_id}
    assert facts(operation)["tinkex.lora_rank"] == 8


def test_a_loss_of_ones_own_is_one_operation_with_its_passes_inside(traces: Traces) -> None:
    training = training_of(ScriptedServer())

    def squared(data: Any, logprobs: Any) -> Any:
        with traces.program.start_as_current_span("my loss"):
            return sum((lp**2).sum() for lp in logprobs), {}

    training.forward_backward_custom([datum(1, 2)], squared).result()
    outer = traces.one("tinkex.forward_backward_custom")
    assert [span.name for span in traces.inside(outer)] == [
        "tinkex.forward",
        "my loss",
        "tinkex.forward_backward",
    ]
    assert (outer.end_time or 0) >= (traces.one("tinkex.forward_backward").end_time or 0)

    async def again() -> None:
        await (await training.forward_backward_custom_async([datum(1, 2)], squared))

    asyncio.run(again())
    assert len(traces.all("tinkex.forward_backward_custom")) == 2


def test_reading_and_managing_is_traced_by_the_names_users_know(traces: Traces) -> None:
    server = ScriptedServer(
        list_training_runs=lambda value, request: reply(
            {"training_runs": [], "cursor": {"offset": 0, "limit": 20, "total_count": 0}}
        )
    )
    rest = RestClient(transport=server.transport, config=Config(default_query={"secret": "hidden-canary"}))
    rest.list_training_runs().result()
    assert traces.names == ["GET /api/v1/training_runs", "tinkex.list_training_runs"]
    assert "hidden-canary" not in traces.text()


def test_the_span_of_a_sample_has_its_parameters_and_results(traces: Traces) -> None:
    sampler = sampler_of(ScriptedServer())
    sampler.sample(PROMPT, 2, PARAMS).result()
    assert facts(traces.one("tinkex.sample")) == {
        "session.id": "sess-1",
        "tinkex.sampling_session_id": "sess-1:sample:0",
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 6,
        "gen_ai.response.finish_reasons": ("stop", "stop"),
        "tinkex.request_ids": ("req-0",),
    }


def test_the_decision_to_keep_nothing_and_the_state_of_a_trace_travel_on() -> None:
    server = ScriptedServer()
    remote = {"traceparent": f"00-{7:032x}-{8:016x}-01", "tracestate": "vendor=1"}
    provider = TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False)
    exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing.use_provider(provider)
    held = context.attach(TraceContextTextMapPropagator().extract(remote, context.Context()))
    try:
        service_of(server).get_server_capabilities()
    finally:
        context.detach(held)
        tracing.use_provider(None)
    (request,) = server.transport.requests
    assert request.headers["traceparent"].startswith(f"00-{7:032x}-")
    assert int(request.headers["traceparent"][-2:], 16) & 1 == 0
    assert exporter.get_finished_spans() == ()
    assert request.headers["tracestate"] == "vendor=1"


class Broken(SpanProcessor):
    """A span processor of the program's that fails at every span, from some moment on."""

    def __init__(self, *, at_start: bool) -> None:
        self._at_start = at_start

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        if self._at_start:
            raise RuntimeError("broken")

    def on_end(self, span: ReadableSpan) -> None:
        raise RuntimeError("broken")


@pytest.mark.parametrize("at_start", [True, False])
def test_span_processors_that_fail_do_not_fail_a_call(at_start: bool) -> None:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(Broken(at_start=at_start))
    server = ScriptedServer()
    tracing.use_provider(provider)
    try:
        training, sampler = training_of(server), sampler_of(server)
        training.forward_backward([datum(1)], "cross_entropy").result(30)
        training.optim_step(AdamParams()).result(30)
        sampler.sample(PROMPT, 1, PARAMS).result(30)
        list(
            sampler_of(StreamingServer(sse_reply(ACCEPTED, token(0), token(1), DONE))).sample_stream(
                PROMPT, 1, PARAMS
            )
        )
    finally:
        tracing.use_provider(None)
    assert server.names().count("optim_step") == 1


# ---- many callers ----


def test_callers_on_many_threads_keep_their_traces_apart(traces: Traces) -> None:
    server = ScriptedServer()
    training, sampler = training_of(server), sampler_of(server)
    start = threading.Barrier(8)

    def work(number: int) -> None:
        start.wait(30)
        for _ in range(5):
            with traces.program.start_as_current_span(f"thread {number}"):
                futures = [
                    training.forward_backward([datum(number)], "cross_entropy").future(),
                    training.optim_step(AdamParams()).future(),
                    sampler.sample(PROMPT, 1, PARAMS),
                ]
                for future in futures:
                    future.result(30)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    roots = [span for span in traces.spans if span.name.startswith("thread")]
    assert len({root.context.trace_id for root in roots}) == 40
    for root in roots:
        operations = traces.inside(root)
        assert [span.name for span in operations] == [
            "tinkex.forward_backward",
            "tinkex.optim_step",
            "tinkex.sample",
        ]
        for operation in operations:
            requests = traces.inside(operation)
            assert len(requests) == 2
            assert {span.context.trace_id for span in requests} == {root.context.trace_id}


def test_tasks_of_an_event_loop_keep_their_traces_apart(traces: Traces) -> None:
    sampler = sampler_of(ScriptedServer())

    async def work(number: int) -> None:
        with traces.program.start_as_current_span(f"task {number}"):
            await sampler.sample_async(PROMPT, 1, PARAMS)
            await sampler.compute_logprobs_async(PROMPT)

    async def main() -> None:
        await asyncio.gather(*(work(number) for number in range(20)))

    asyncio.run(main())
    for number in range(20):
        inside = traces.inside(traces.one(f"task {number}"))
        assert [span.name for span in inside] == ["tinkex.sample", "tinkex.compute_logprobs"]
        assert [span.name for span in traces.inside(inside[0])] == [
            "POST /api/v1/asample",
            "POST /api/v1/retrieve_future",
        ]


def test_the_callers_own_variables_go_with_a_call_and_not_with_shared_work() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="none")

    async def read() -> str:
        return variable.get()

    async def read_alone() -> str:
        return await create_detached_task(read())

    variable.set("mine")
    # Calls that arrive together are begun together, and still each in the context of its own caller.
    other = contextvars.Context().run(background().submit, read())
    mine = background().submit(read())
    assert (mine.result(30), other.result(30)) == ("mine", "none")
    assert background().run(read_alone()) == "none"
    received: list[str] = []
    both_ran = threading.Event()

    async def tell() -> None:
        received.append(variable.get())
        if len(received) == 2:
            both_ran.set()

    background().start(tell())
    background().start(tell(), detached=True)
    assert both_ran.wait(30)
    assert received == ["mine", "none"]


def test_heartbeats_belong_to_no_trace(traces: Traces) -> None:
    server = ScriptedServer()
    caller = service_of(server).holder.caller
    session = Session(caller, heartbeat_interval_s=0.01)

    async def open_and_wait() -> None:
        with tracing.trace_operation("long"):
            await session.opened()
            while server.names().count("session_heartbeat") < 3:  # noqa: ASYNC110 - what is waited for is a call
                await asyncio.sleep(0.01)
        await session.finish("success")

    background().run(open_and_wait())
    assert "POST /api/v1/create_session" in traces.names
    assert not [name for name in traces.names if "heartbeat" in name]
    assert set(traceparents(server, "/session_heartbeat")) == {""}


# ---- what goes wrong ----


def test_every_try_is_a_span_of_its_own(traces: Traces) -> None:
    server = ScriptedServer()
    training = training_of(server)
    Failing(server, "optim_step", 503)
    training.optim_step(AdamParams()).result()
    operation = traces.one("tinkex.optim_step")
    assert operation.status.status_code is StatusCode.UNSET
    first, second, _ = traces.inside(operation)
    assert first.name == second.name == "POST /api/v1/optim_step"
    assert (facts(first)["http.response.status_code"], facts(first)["error.type"]) == (503, "503")
    assert first.status.status_code is StatusCode.ERROR
    assert facts(second)["http.request.resend_count"] == 1
    assert second.status.status_code is StatusCode.UNSET
    assert len(set(traceparents(server, "/optim_step"))) == 2


def test_an_operation_that_fails_says_with_what_and_nothing_more(traces: Traces) -> None:
    server = ScriptedServer()
    training = training_of(server)
    Failing(server, "optim_step", 404)
    with pytest.raises(NotFoundError, match="private words"):
        training.optim_step(AdamParams()).result()
    operation = traces.one("tinkex.optim_step")
    assert operation.status.status_code is StatusCode.ERROR
    assert operation.status.description == "NotFoundError"
    assert facts(operation)["error.type"] == "tinkex.errors.NotFoundError"
    assert facts(operation)["tinkex.error.status_code"] == 404
    (event,) = operation.events
    assert (event.name, dict(event.attributes or {})) == (
        "exception",
        {"exception.type": "tinkex.errors.NotFoundError"},
    )
    assert "private" not in traces.text()


def test_a_result_that_is_an_error_is_traced_with_its_category(traces: Traces) -> None:
    server = ScriptedServer()
    server.answers["optim_step"] = lambda value, request: server.accept(
        {"error": "private words", "category": "user"}
    )
    with pytest.raises(RequestFailedError):
        training_of(server).optim_step(AdamParams()).result()
    assert facts(traces.one("tinkex.optim_step"))["tinkex.error.category"] == "user"
    assert traces.one("POST /api/v1/optim_step").status.status_code is StatusCode.UNSET
    assert "private" not in traces.text()


def test_a_request_without_an_answer_is_an_error_of_its_span(traces: Traces) -> None:
    def silence(value: Any, request: Request) -> Reply:
        raise APIConnectionError(None, "private words")

    server = ScriptedServer(get_server_capabilities=silence)
    with pytest.raises(APIConnectionError):
        service_of(server, max_retries=0).get_server_capabilities()
    for name in ("GET /api/v1/get_server_capabilities", "tinkex.get_server_capabilities"):
        assert facts(traces.one(name))["error.type"] == "tinkex.errors.APIConnectionError"
    assert "private" not in traces.text()


def test_a_mistake_that_surfaces_at_the_call_ends_the_span_there(traces: Traces) -> None:
    training = training_of(ScriptedServer())
    with pytest.raises(TypeError):
        training.save_state("name", user_metadata={"a": object()})  # type: ignore[dict-item]
    assert traces.one("tinkex.save_state").status.status_code is StatusCode.ERROR
    training.save_state("name").result()
    assert facts(traces.all("tinkex.save_state")[1])["tinkex.seq_ids"] == (1,)


# ---- waiters ----


class Held(ScriptedServer):
    """Has no result before ``ready`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.ready, self.asked = threading.Event(), threading.Event()

    async def later(self, request_id: str) -> Reply:
        self.asked.set()
        while not self.ready.is_set():  # noqa: ASYNC110 - set by another thread
            await asyncio.sleep(0.005)
        return self.results[request_id]

    def on_retrieve_future(self, value: types.FutureRetrieveRequest, request: Request) -> Any:
        return self.later(value.request_id)


def ended(traces: Traces, name: str) -> ReadableSpan:
    """A span that ends without anybody waiting for it."""
    patience = threading.Event()
    for _ in range(1000):
        if traces.all(name):
            break
        patience.wait(0.01)
    return traces.one(name)


def test_a_span_lasts_until_the_result_is_there_whether_or_not_anything_waits(traces: Traces) -> None:
    server = Held()
    server.ready.set()
    training = training_of(server)
    server.ready.clear()
    future = training.optim_step(AdamParams())
    with pytest.raises(TimeoutError):
        future.result(timeout=0.02)
    assert "tinkex.optim_step" not in traces.names
    server.ready.set()
    del future
    span = ended(traces, "tinkex.optim_step")
    assert span.status.status_code is StatusCode.UNSET
    assert len(traces.inside(span)) == 2


def test_the_span_of_a_cancelled_operation_ends_immediately_and_without_an_error(traces: Traces) -> None:
    server = Held()
    sampler = sampler_of(server)
    future = sampler.sample(PROMPT, 1, PARAMS)
    assert server.asked.wait(30)
    assert future.cancel()
    span = traces.one("tinkex.sample")
    assert facts(span)["tinkex.cancelled"] is True
    assert span.status.status_code is StatusCode.UNSET
    assert facts(ended(traces, "POST /api/v1/retrieve_future"))["tinkex.cancelled"] is True


def test_an_operation_that_never_began_ends_its_span_too(traces: Traces) -> None:
    operation = tracing.start_operation("sample")
    assert operation is not None

    async def never() -> None:
        raise AssertionError("it was cancelled before it began")

    held = threading.Event()
    background().loop.call_soon_threadsafe(held.wait)  # nothing begins before it is set
    try:
        with operation.activate():
            assert background().submit(never(), operation.end).cancel()
    finally:
        held.set()
    assert facts(traces.one("tinkex.sample"))["tinkex.cancelled"] is True


PENDING = """
import asyncio, sys
import opentelemetry.trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter
import tinkex
from tinkex.testing import MockTransport, reply

provider = TracerProvider()
provider.add_span_processor(BatchSpanProcessor(ConsoleSpanExporter()))
opentelemetry.trace.set_tracer_provider(provider)

async def answer(request):
    if request.path.endswith("retrieve_future"):
        await asyncio.sleep(1000)
    name = request.path.rpartition("/")[2]
    return reply({"create_session": {"session_id": "s"}, "dynamic_config": {}, "config": {},
                  "create_sampling_session": {"sampling_session_id": "s:0"}}.get(name)
                 or {"request_id": "r", "sample_sequence_ids": ["a"]})

service = tinkex.ServiceClient(transport=MockTransport(answer))
sampler = service.create_sampling_client(base_model="toy")
sampler.sample(tinkex.ModelInput.from_ints([1]), 1, tinkex.SamplingParams(max_tokens=1))
"""


@pytest.mark.slow
def test_the_end_of_the_program_ends_the_spans_and_the_provider_still_gets_them() -> None:
    done = subprocess.run([sys.executable, "-c", PENDING], capture_output=True, text=True, check=True)
    assert '"name": "tinkex.create_sampling_client"' in done.stdout
    assert '"name": "tinkex.sample"' in done.stdout
    assert '"tinkex.unfinished": true' in done.stdout
    assert "Traceback" not in done.stderr


MISSPELT = """
from opentelemetry.sdk.trace import TracerProvider
import tinkex
from tinkex.observability import tracing
from tinkex.testing import MockTransport, reply

tracing.use_provider(TracerProvider())
transport = MockTransport(lambda request: reply({"supported_models": []}))
tinkex.ServiceClient(transport=transport).get_server_capabilities()
assert "traceparent" not in transport.requests[0].headers
"""


@pytest.mark.slow
def test_propagators_that_do_not_exist_are_said_once_and_fail_no_call() -> None:
    environment = {**os.environ, "OTEL_PROPAGATORS": "tracecontxt"}
    done = subprocess.run(
        [sys.executable, "-c", MISSPELT], env=environment, capture_output=True, text=True, check=True
    )
    assert "OTEL_PROPAGATORS is invalid" in done.stderr


# ---- streams ----


def test_a_stream_is_one_operation_until_its_last_token(traces: Traces) -> None:
    sampler = sampler_of(StreamingServer(sse_reply(ACCEPTED, token(0), token(1), DONE)))
    with traces.program.start_as_current_span("user code"):
        stream = sampler.sample_stream(PROMPT, 1, PARAMS)
    traces.clear()
    assert len(list(stream)) == 3  # read outside of the block, and still part of its trace
    span = traces.one("tinkex.sample_stream")
    assert facts(span)["gen_ai.usage.output_tokens"] == 2
    assert facts(span)["gen_ai.response.finish_reasons"] == ("length",)
    assert facts(span)["tinkex.request_ids"] == ("r1",)
    assert facts(span)["tinkex.streamed"] is True
    assert [event.name for event in span.events] == ["tinkex.first_token"]
    (attempt,) = traces.inside(span)
    assert attempt.name == "POST /api/v1/stream_sample"


def test_a_stream_that_is_closed_forgotten_or_breaks_ends_its_span(traces: Traces) -> None:
    sampler = sampler_of(StreamingServer(sse_reply(ACCEPTED, token(0))))
    with sampler.sample_stream(PROMPT, 1, PARAMS) as stream:
        next(stream)
    assert facts(traces.one("tinkex.sample_stream"))["tinkex.cancelled"] is True
    traces.clear()
    sampler.sample_stream(PROMPT, 1, PARAMS)  # nobody holds it
    assert facts(ended(traces, "tinkex.sample_stream"))["gen_ai.usage.output_tokens"] == 0
    traces.clear()
    with pytest.raises(StreamInterruptedError):
        list(sampler.sample_stream(PROMPT, 1, PARAMS))
    broken = traces.one("tinkex.sample_stream")
    assert facts(broken)["error.type"] == "tinkex.errors.StreamInterruptedError"
    assert broken.status.status_code is StatusCode.ERROR


def test_a_stream_is_read_by_tasks_of_an_event_loop_too(traces: Traces) -> None:
    sampler = sampler_of(StreamingServer(sse_reply(ACCEPTED, token(0), token(1), DONE)))

    async def main() -> None:
        async for _ in await sampler.sample_stream_async(PROMPT, 1, PARAMS):
            pass

    asyncio.run(main())
    assert traces.one("tinkex.sample_stream").status.status_code is StatusCode.UNSET


def test_a_server_without_streaming_gets_the_sample_request_within_the_same_operation(traces: Traces) -> None:
    server = ScriptedServer(stream_sample=lambda value, request: reply({"detail": "unknown"}, 404))
    list(sampler_of(server).sample_stream(PROMPT, 1, PARAMS))
    span = traces.one("tinkex.sample_stream")
    assert facts(span)["tinkex.streamed"] is False
    assert [inside.name for inside in traces.inside(span)] == [
        "POST /api/v1/stream_sample",
        "POST /api/v1/asample",
        "POST /api/v1/retrieve_future",
    ]
    assert "tinkex.sample" not in traces.names


# ---- queues and secrets ----


@pytest.mark.slow
def test_what_the_server_says_about_its_queue_is_an_event(traces: Traces) -> None:
    server = ScriptedServer()
    training = training_of(server, poll_backoff=(0.001, 0.001))
    waiting = [
        reply({"type": "try_again", "queue_state": "paused_capacity", "queue_state_reason": "private"}, 408),
        reply({"type": "try_again", "queue_state": "active"}, 408),
    ]
    server.answers["retrieve_future"] = lambda value, request: (
        waiting.pop(0) if waiting else server.results[value.request_id]
    )
    training.optim_step(AdamParams()).result()
    span = traces.one("tinkex.optim_step")
    assert [(e.name, dict(e.attributes or {})) for e in span.events] == [
        ("tinkex.queue_state", {"tinkex.queue_state": "paused_capacity"}),
        ("tinkex.queue_state", {"tinkex.queue_state": "active"}),
    ]
    polls = traces.all("POST /api/v1/retrieve_future")[1:]
    assert [facts(poll)["http.response.status_code"] for poll in polls] == [408, 408, 200]
    assert {poll.status.status_code for poll in polls} == {StatusCode.UNSET}
    assert "private" not in traces.text()


def test_neither_keys_nor_data_are_in_any_span(traces: Traces) -> None:
    server = ScriptedServer()
    settings = {
        "default_headers": {"x-secret": "canary-header"},
        "default_query": {"token": "canary-query"},
        "user_metadata": {"note": "canary-metadata"},
        "cloudflare_client_secret": "canary-cloudflare",
    }
    training, sampler = training_of(server, **settings), sampler_of(server, **settings)
    training.forward_backward([datum(777_001, 777_002)], "cross_entropy").result()
    training.save_state("step", user_metadata={"note": "canary-metadata"}).result()
    stops = types.SamplingParams(max_tokens=4, stop=["canary-stop"])
    sampler.sample(types.ModelInput.from_ints([777_003]), 1, stops).result()
    Failing(server, "optim_step", 400, times=10)
    with pytest.raises(Exception, match="private words"):
        training.optim_step(AdamParams()).result()
    text = traces.text()
    assert "tinkex.forward_backward" in text
    for secret in (KEY, "canary", "77700", "private"):
        assert secret not in text


# ---- off ----


def test_the_switch_is_honoured(traces: Traces, monkeypatch: pytest.MonkeyPatch) -> None:
    server = StreamingServer(sse_reply(ACCEPTED, token(0), token(1), DONE))
    training, sampler = training_of(server, tracing=False), sampler_of(server, tracing=False)
    training.forward_backward([datum(1)], "cross_entropy").result()
    training.get_info()
    sampler.sample(PROMPT, 1, PARAMS).result()
    list(sampler.sample_stream(PROMPT, 1, PARAMS))
    RestClient(transport=server.transport, config=Config(tracing=False)).get_sampler("s").result()
    assert traces.names == []
    assert {request.headers.get("traceparent") for request in server.transport.requests} == {None}
    monkeypatch.setenv("TINKEX_TRACING", "0")
    assert not Config.resolve(needs_key=False).tracing
    monkeypatch.delenv("TINKEX_TRACING")
    assert Config.resolve(needs_key=False).tracing


def test_without_a_provider_nothing_is_made() -> None:
    assert isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)
    assert tracing.find_tracer() is None
    assert tracing.start_operation("sample") is None
    with tracing.trace_operation("sample") as operation:
        assert operation is None
    tracing.use_provider(trace.NoOpTracerProvider())
    try:
        assert tracing.start_operation("sample") is None
    finally:
        tracing.use_provider(None)


WITHOUT = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if {blocked} and name.partition(".")[0] == "opentelemetry":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
import tinkex
from tinkex.testing import MockTransport, reply
service = tinkex.ServiceClient(transport=MockTransport(lambda request: reply({{"supported_models": []}})))
service.get_server_capabilities()
assert not [name for name in sys.modules if name.startswith("opentelemetry")], "it was imported"
"""


@pytest.mark.slow
@pytest.mark.parametrize("blocked", [True, False], ids=["not installed", "installed"])
def test_a_program_that_does_not_use_opentelemetry_does_not_load_it(blocked: bool) -> None:
    program = WITHOUT.format(blocked=blocked)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=60)


def test_where_nothing_is_traced_an_operation_takes_two_calls_to_find_that_out() -> None:
    sampler = sampler_of(ScriptedServer())
    called: list[str] = []

    def watch(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename == tracing.__file__:
            called.append(frame.f_code.co_name)

    sys.setprofile(watch)
    try:
        future = sampler.sample(PROMPT, 1, PARAMS)
    finally:
        sys.setprofile(None)
    future.result()
    assert called == ["start_operation", "find_tracer"]

    async def profile(function: Any) -> None:
        sys.setprofile(function)

    called.clear()
    background().run(profile(watch))
    try:
        sampler.sample(PROMPT, 1, PARAMS).result()
    finally:
        background().run(profile(None))
    # On the loop, submission, poll and result only look whether there is an operation.
    assert set(called) == {"current"}
