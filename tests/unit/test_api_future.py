"""The one future: for threads, for event loops and for ``concurrent.futures``."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from tests.scripted import ScriptedServer
from tinkex import (
    AdamParams,
    AdminClient,
    APIFuture,
    AwaitableConcurrentFuture,
    RestClient,
    ServiceClient,
    types,
)
from tinkex._runtime import background
from tinkex.config import Config
from tinkex.testing import Reply, Request, reply

CONFIG = Config(base_url="http://host", api_key="tml-test", max_retries=0, project_id="p")
PROMPT = types.ModelInput.from_ints([1, 2, 3])
PARAMS = types.SamplingParams(max_tokens=4)
DATUM = types.Datum(PROMPT, {"target_tokens": [2, 3, 4]})

SERVER = ScriptedServer(
    audit_log=lambda value, request: reply({"entries": []}),
    list_sessions=lambda value, request: reply({"sessions": []}),
    copy_weights=lambda value, request: reply({"tinker_path": "tinker://r/weights/2"}),
)


@pytest.fixture(scope="module")
def service() -> Iterator[ServiceClient]:
    with ServiceClient(transport=SERVER.transport, config=CONFIG) as client:
        yield client


Call = Callable[[ServiceClient], Any]
CALLS: dict[str, Call] = {
    "service": lambda service: service.copy_weights("tinker://r/weights/1"),
    "training": lambda service: service.create_lora_training_client("toy").optim_step(AdamParams()),
    "sampling": lambda service: (
        service.create_sampling_client(base_model="toy").result().sample(PROMPT, 1, PARAMS)
    ),
    "logprobs": lambda service: service.create_sampling_client(base_model="toy").compute_logprobs(PROMPT),
    "rest": lambda service: RestClient(transport=SERVER.transport, config=CONFIG).list_sessions(),
    "admin": lambda service: AdminClient(transport=SERVER.transport, config=CONFIG).get_audit_log(),
}
every_client = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


@every_client
def test_a_result_is_a_future_for_threads(service: ServiceClient, call: Call) -> None:
    future = call(service)
    assert isinstance(future, Future)
    assert isinstance(future, APIFuture)
    assert isinstance(future, AwaitableConcurrentFuture)
    assert future.future() is future
    value = future.result(timeout=60)
    assert future.exception() is None
    assert concurrent.futures.wait([call(service), call(service)], timeout=60).not_done == set()
    assert len(list(concurrent.futures.as_completed([call(service), call(service)], timeout=60))) == 2
    done: Future[Any] = Future()
    call(service).add_done_callback(lambda finished: done.set_result(finished.result()))
    assert type(done.result(timeout=60)) is type(value)


@every_client
def test_a_result_is_a_future_for_event_loops(service: ServiceClient, call: Call) -> None:
    kind = type(call(service).result(timeout=60))

    async def main() -> list[Any]:
        loop = asyncio.get_running_loop()
        future = await loop.run_in_executor(
            None, call, service
        )  # some make a client first, which would warn here
        async with asyncio.TaskGroup() as group:
            task = group.create_task(future.coroutine())
        return [
            await future,
            await future.result_async(timeout=60),
            *await asyncio.gather(future, future.coroutine()),
            await asyncio.create_task(future.coroutine()),
            await asyncio.wrap_future(future),
            await asyncio.wait_for(future, 60),
            task.result(),
        ]

    assert {type(value) for value in asyncio.run(main())} == {kind}


class Held:
    """A request that the server answers when the test says so, and a future of it."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.arrived = threading.Event()
        self.cancelled = threading.Event()
        rest = RestClient(transport=ScriptedServer(list_sessions=self.answer).transport, config=CONFIG)
        self.future = rest.list_sessions()

    async def answer(self, value: Any, request: Request) -> Reply:
        self.arrived.set()
        try:
            assert await asyncio.to_thread(self.opened.wait, 60)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return reply({"sessions": ["a"]})


@pytest.fixture
def held() -> Iterator[Held]:
    held = Held()
    yield held
    held.opened.set()
    concurrent.futures.wait([held.future], timeout=60)


async def test_cancelling_a_coroutine_stops_only_the_waiting(held: Held) -> None:
    for waiting in (held.future.coroutine(), held.future.result_async()):
        task = asyncio.create_task(waiting)
        assert await asyncio.to_thread(held.arrived.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(held.future, 0.01)
    with pytest.raises(TimeoutError):
        await held.future.result_async(timeout=0.01)
    assert not held.future.done()
    held.opened.set()
    assert (await held.future.coroutine()).sessions == (await held.future).sessions == ["a"]


def test_a_timeout_of_a_thread_leaves_the_operation_running(held: Held) -> None:
    with pytest.raises(TimeoutError):
        held.future.result(timeout=0.01)
    with pytest.raises(TimeoutError):
        held.future.exception(timeout=0.01)
    held.opened.set()
    assert held.future.result(timeout=60).sessions == ["a"]


def test_cancelling_the_future_cancels_the_request(held: Held) -> None:
    assert held.arrived.wait(60)
    assert held.future.cancel()
    assert held.cancelled.wait(60)
    assert concurrent.futures.wait([held.future], timeout=60).done == {held.future}
    with pytest.raises(concurrent.futures.CancelledError):
        held.future.result()


def test_a_future_that_was_cancelled_before_it_started_is_done_for_threads() -> None:
    rest = RestClient(transport=SERVER.transport, config=CONFIG)

    async def on_the_loop() -> AwaitableConcurrentFuture[Any]:
        future = rest.list_sessions()
        assert future.cancel()  # nothing is started while the loop runs this
        return future

    future = background().run(on_the_loop())
    assert concurrent.futures.wait([future], timeout=60).done == {future}
    assert list(concurrent.futures.as_completed([future], timeout=60)) == [future]


waits = pytest.mark.parametrize(
    "block", [lambda future: future.result(1), lambda future: future.exception(1)]
)


@waits
def test_blocking_the_clients_own_loop_raises_immediately(held: Held, block: Callable[[Any], Any]) -> None:
    async def on_the_loop() -> None:
        block(held.future)

    with pytest.raises(RuntimeError, match="await it there"):
        background().run(on_the_loop())
    held.opened.set()
    held.future.result(timeout=60)
    background().run(on_the_loop())  # a finished one blocks nothing


@waits
def test_a_done_callback_that_waits_for_its_own_client_raises_immediately(
    block: Callable[[Any], Any],
) -> None:
    added, opened = threading.Event(), threading.Event()

    async def list_sessions(value: Any, request: Request) -> Reply:
        assert await asyncio.to_thread(added.wait, 60)
        return reply({"sessions": ["a"]})

    async def copy_weights(value: Any, request: Request) -> Reply:
        assert await asyncio.to_thread(opened.wait, 60)
        return reply({"tinker_path": "tinker://r/weights/2"})

    server = ScriptedServer(list_sessions=list_sessions, copy_weights=copy_weights)
    rest = RestClient(transport=server.transport, config=CONFIG)
    pending, seen = rest.copy_weights("tinker://r/weights/1"), Future[Any]()

    def callback(done: Future[Any]) -> None:
        try:
            block(done)  # which is finished
            block(pending)
        except BaseException as error:  # noqa: BLE001 -- the test looks at it
            seen.set_result(error)

    rest.list_sessions().add_done_callback(callback)
    added.set()
    error = seen.result(timeout=60)
    assert isinstance(error, RuntimeError)
    assert "its own client" in str(error)
    opened.set()
    assert pending.result(timeout=60) == "tinker://r/weights/2"


def test_a_done_callback_may_wait_for_another_client(held: Held) -> None:
    """Callbacks run on threads of their client, so that nothing else waits for them."""
    seen: Future[list[str]] = Future()

    def callback(_: Future[Any]) -> None:
        assert not held.future.done()
        held.opened.set()
        seen.set_result(held.future.result(timeout=60).sessions)

    RestClient(transport=SERVER.transport, config=CONFIG).list_sessions().add_done_callback(callback)
    assert seen.result(timeout=60) == ["a"]


def test_a_future_made_from_another_one_ends_as_that_one_does(held: Held) -> None:
    following = AwaitableConcurrentFuture(held.future)
    plain: Future[int] = Future()
    failed = AwaitableConcurrentFuture(plain)
    plain.set_exception(LookupError("gone"))
    with pytest.raises(LookupError, match="gone"):
        failed.result(timeout=60)
    assert held.arrived.wait(60)
    assert following.cancel()
    assert held.cancelled.wait(60)
    assert concurrent.futures.wait([following, held.future], timeout=60).not_done == set()


def test_a_future_of_a_program_needs_only_two_methods() -> None:
    class Mine(APIFuture[int]):
        def result(self, timeout: float | None = None) -> int:
            return 3

        async def result_async(self, timeout: float | None = None) -> int:
            return 3

    async def main() -> tuple[int, int]:
        return await Mine(), await Mine().coroutine()

    assert Mine().future().result(timeout=60) == 3
    assert asyncio.run(main()) == (3, 3)
