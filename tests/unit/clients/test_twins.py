"""The async forms of client methods: derived, and in every way what a hand-written coroutine function would be."""

from __future__ import annotations

import asyncio
import inspect
import threading
import warnings
from concurrent.futures import Future
from datetime import date
from typing import Any

import pytest

from tests.scripted import ScriptedServer
from tinkex import AdminClient, RestClient, SamplingClient, ServiceClient, TrainingClient, types
from tinkex._runtime import background
from tinkex.config import Config
from tinkex.errors import ExperimentalWarning
from tinkex.testing import MockTransport, Reply, Request, reply

CONFIG = Config(base_url="http://host", api_key="tml-test", max_retries=0)


@pytest.fixture
def server() -> ScriptedServer:
    return ScriptedServer()


@pytest.mark.parametrize(
    ("method", "returns"),
    [
        (ServiceClient.create_lora_training_client, "PendingTrainingClient"),
        (ServiceClient.create_lora_training_client_async, "TrainingClient"),
        (TrainingClient.forward_backward_async, "AwaitableConcurrentFuture[types.ForwardBackwardOutput]"),
        (SamplingClient.sample, "AwaitableConcurrentFuture[types.SampleResponse]"),
        (SamplingClient.sample_async, "types.SampleResponse"),
        (SamplingClient.get_base_model_async, "str"),
        (RestClient.copy_weights_async, "str"),
        (RestClient.get_sampler_async, "types.GetSamplerResponse"),
        (RestClient.delete_checkpoint_async, "None"),
    ],
    ids=lambda value: getattr(value, "__qualname__", value),
)
def test_a_method_describes_itself(method: Any, returns: str) -> None:
    assert inspect.signature(method).return_annotation == returns
    assert method.__annotations__["return"] == returns
    assert method.__doc__
    assert inspect.iscoroutinefunction(method) == method.__name__.endswith("_async")
    client, _, name = method.__qualname__.partition(".")
    assert getattr({"ServiceClient": ServiceClient, "TrainingClient": TrainingClient, "SamplingClient": SamplingClient,
                    "RestClient": RestClient}[client], name) is method  # fmt: skip
    assert method.__module__.startswith("tinkex.clients.")


def test_the_async_form_calls_the_method_that_is_there() -> None:
    """Programs replace methods to record or to trace, on the class or on one client."""
    rest = RestClient(transport=MockTransport(lambda _: reply({})), config=CONFIG)
    asked: list[str] = []

    def get_session(session_id: str, access_scope: str = "owned") -> Future[str]:
        asked.append(f"{session_id} {access_scope}")
        done: Future[str] = Future()
        done.set_result("mine")
        return done

    rest.get_session = get_session  # type: ignore[method-assign, assignment]
    assert asyncio.run(rest.get_session_async("s", access_scope="accessible")) == "mine"  # type: ignore[comparison-overlap]
    assert asked == ["s accessible"]


async def test_cancelling_the_async_form_cancels_the_request() -> None:
    arrived, cancelled = threading.Event(), threading.Event()

    async def never(value: Any, request: Request) -> Reply:
        arrived.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return reply({})

    server = ScriptedServer(get_session=never, get_server_capabilities=never)
    rest = RestClient(transport=server.transport, config=CONFIG)
    service = ServiceClient(transport=server.transport, config=CONFIG)
    for waiting in (rest.get_session_async("s"), service.get_server_capabilities_async()):
        arrived.clear()
        cancelled.clear()
        task = asyncio.ensure_future(waiting)
        assert await asyncio.to_thread(arrived.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(cancelled.wait, 10)


def test_blocking_the_clients_own_loop_is_an_error(
    server: ScriptedServer,
) -> None:
    with ServiceClient(transport=server.transport, config=CONFIG) as service:

        async def on_the_loop() -> int:
            return len(service.get_server_capabilities().supported_models)

        with pytest.raises(RuntimeError, match="await it there"):
            background().run(on_the_loop())


def test_wrong_arguments_are_named(server: ScriptedServer) -> None:
    service = ServiceClient(transport=server.transport, config=CONFIG)
    with pytest.raises(TypeError, match="base_model"):
        service.create_lora_training_client()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="ranks"):
        asyncio.run(service.create_lora_training_client_async("toy", ranks=8))  # type: ignore[call-arg]


def test_an_iterator_works_in_both_worlds() -> None:
    pages = {0: ["a", "b"], 2: ["c"], 3: []}

    def answer(request: Request) -> Reply:
        return reply({"sessions": pages[int(request.query["offset"])]})

    transport = MockTransport(answer)
    rest = RestClient(transport=transport, config=CONFIG)
    found = rest.iter_sessions(page_size=2)
    assert transport.requests == [], "pages are requested when they are needed"
    assert next(found) == "a"
    assert len(transport.requests) == 1
    assert list(found) == ["b", "c"]
    assert list(found) == []

    async def collect() -> tuple[list[str], list[str]]:
        return [one async for one in rest.iter_sessions_async()], [one async for one in rest.iter_sessions()]

    assert asyncio.run(collect()) == (["a", "b", "c"], ["a", "b", "c"])


def test_pages_by_cursor_end_where_there_is_none() -> None:
    cursor = {"last_created_at": "2026-08-01T00:00:00Z", "last_session_id": "a"}

    def answer(request: Request) -> Reply:
        # An empty page in the middle is not the end: filters may leave nothing of it.
        return reply({"sessions": [], "next_cursor": None if b"cursor" in request.body else cursor})

    transport = MockTransport(answer)
    rest = RestClient(transport=transport, config=CONFIG)
    with pytest.warns(ExperimentalWarning):
        assert list(rest.iter_search_sessions(types.SessionSearchRequest())) == []
    assert len(transport.requests) == 2


def test_warnings_point_at_the_line_of_the_program() -> None:
    transport = MockTransport(lambda _: reply({"sessions": [], "entries": []}))
    rest = RestClient(transport=transport, config=CONFIG)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rest.search_sessions(types.SessionSearchRequest()).result(10)
        list(rest.iter_search_sessions(types.SessionSearchRequest()))
        rest.get_audit_log("all", date(2026, 8, 1)).result(10)

        async def main() -> None:
            await rest.search_sessions_async(types.SessionSearchRequest())
            await rest.get_audit_log_async()

        asyncio.run(main())
    assert [warning.filename for warning in caught] == [__file__] * 5


def test_the_admin_client_has_both_forms() -> None:
    admin = AdminClient(transport=MockTransport(lambda _: reply({"entries": []})), config=CONFIG)
    assert admin.get_audit_log().result(10).entries == asyncio.run(admin.get_audit_log_async()).entries == []
