"""Samples that wait in vain, places that are given back, and who comes first."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scripted import ScriptedServer, over_http
from tinkex import APIConnectionError, RetryConfig, ServiceClient, types
from tinkex._runtime import background
from tinkex.clients._watchdog import ProgressWatchdog
from tinkex.observability.events import Event, SamplingPaused
from tinkex.testing import Reply, Request, reply

PROMPT = types.ModelInput.from_ints([1, 2, 3])
PARAMS = types.SamplingParams(max_tokens=4)
PAUSED = reply(
    {"type": "try_again", "queue_state": "paused_capacity", "queue_state_reason": "17 jobs before you"},
    status=408,
)


@contextmanager
def connected(**answers: Any) -> Iterator[tuple[ScriptedServer, ServiceClient]]:
    server = ScriptedServer(**answers)
    with ServiceClient(transport=server.transport) as service:
        yield server, service


# ---- no progress ----


@pytest.mark.slow
def test_a_stuck_sample_ends_and_says_what_the_server_said() -> None:
    with connected(retrieve_future=lambda *_: PAUSED) as (server, service):
        server.answers["client_dynamic_config"] = lambda *_: reply({"sample_cancel_enabled": True})
        config = RetryConfig(progress_timeout=1.0)  # long enough for a poll on a busy machine
        sampler = service.create_sampling_client(base_model="toy", retry_config=config)
        futures = [sampler.sample(PROMPT, 1, PARAMS) for _ in range(3)]
        for future in futures:
            with pytest.raises(APIConnectionError, match=r"no progress.*paused capacity: 17 jobs before you"):
                future.result(timeout=30)
        while len(server.values("cancel_future")) < 3:
            background().run(asyncio.sleep(0.01))
    assert len(server.values("asample")) == 3, "a sample that is stuck is not submitted again"


async def test_as_long_as_something_finishes_nothing_is_stuck() -> None:
    now = 0.0
    progress = ProgressWatchdog(10.0, clock=lambda: now)
    progress.record_queue_state("paused_rate_limit", None)

    async def call(until: asyncio.Event) -> str:
        async with progress.watch():
            await until.wait()
        return "done"

    never, soon = asyncio.Event(), asyncio.Event()
    slow, quick = (asyncio.create_task(call(event)) for event in (never, soon))
    await asyncio.sleep(0)
    now = 9.0
    soon.set()
    assert await quick == "done"
    now = 18.0  # long after it began, but only 9 seconds after something finished
    progress.check()
    await asyncio.sleep(0)
    assert not slow.done()
    now = 19.5
    progress.check()
    with pytest.raises(APIConnectionError, match="queue state is paused rate limit"):
        await slow
    # after a time without anything to do the timeout starts again
    now = 100.0
    again = asyncio.create_task(call(never))
    await asyncio.sleep(0)
    progress.check()
    await asyncio.sleep(0)
    assert not again.done()
    again.cancel()
    with pytest.raises(asyncio.CancelledError):
        await again


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "offer"),
    [
        (RetryConfig(progress_timeout=0.05, enable_stuck_detection=False), {}),
        (RetryConfig(progress_timeout=0.05), {"sample_enable_stuck_detection": False}),
    ],
)
def test_the_progress_timeout_can_be_switched_off(config: RetryConfig, offer: dict[str, Any]) -> None:
    polls = 0

    async def poll(value: types.FutureRetrieveRequest, request: Request) -> Reply:
        nonlocal polls
        polls += 1
        await asyncio.sleep(0.05)
        return PAUSED if polls < 3 else server.results[value.request_id]

    with connected(retrieve_future=poll, client_config=lambda *_: reply(offer)) as (server, service):
        sampler = service.create_sampling_client(base_model="toy", retry_config=config)
        assert len(sampler.sample(PROMPT, 1, PARAMS).result(timeout=30).sequences) == 1


# ---- places ----


class Gate:
    """Keeps polls and submissions until they are let go."""

    def __init__(self) -> None:
        self.event: asyncio.Event | None = None

    async def wait(self) -> None:
        self.event = self.event or asyncio.Event()
        await self.event.wait()

    def open(self) -> None:
        async def set_it() -> None:
            self.event = self.event or asyncio.Event()
            self.event.set()

        background().run(set_it())


@pytest.mark.slow
@settings(max_examples=15)
@given(st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=12))
def test_no_cancellation_at_any_moment_leaks_a_slot(cuts: list[tuple[int, bool]]) -> None:
    """Two slots, many samples, cancelled while they wait, are submitted or are polled: two later ones run concurrently."""
    gate = Gate()

    async def submit(value: types.SampleRequest, request: Request) -> Reply:
        await asyncio.sleep(0)
        return server.on_asample(value, request)

    async def poll(value: types.FutureRetrieveRequest, request: Request) -> Reply:
        await gate.wait()
        return server.results[value.request_id]

    offer = {"sample_max_concurrent_requests": 2, "sample_dispatch_bytes_semaphore_size": 40}
    with connected(client_config=lambda *_: reply(offer)) as (server, service):
        sampler = service.create_sampling_client(base_model="toy")
        server.answers["asample"], server.answers["retrieve_future"] = submit, poll
        futures = [sampler.sample(PROMPT, 1, PARAMS) for _ in range(31)]
        for place, pause in cuts:
            futures[place].cancel()
            if pause:
                background().run(asyncio.sleep(0))
        gate.open()
        for future in futures:
            if not future.cancelled():
                future.result(timeout=30)

        closed, polled = Gate(), list[str]()

        async def hold(value: types.FutureRetrieveRequest, request: Request) -> Reply:
            polled.append(value.request_id)
            await closed.wait()
            return server.results[value.request_id]

        server.answers["retrieve_future"] = hold
        following = [sampler.sample(PROMPT, 1, PARAMS) for _ in range(3)]
        deadline = time.monotonic() + 30
        while len(polled) < 2:
            assert time.monotonic() < deadline, "a slot was lost"
            background().run(asyncio.sleep(0.001))
        for _ in range(20):
            background().run(asyncio.sleep(0))
        assert len(polled) == 2, "a slot was gained"
        closed.open()
        assert all(future.result(timeout=30) for future in following)


def test_a_caller_whose_loop_or_thread_ends_releases_its_slot() -> None:
    gate = Gate()

    async def poll(value: types.FutureRetrieveRequest, request: Request) -> Reply:
        await gate.wait()
        return server.results[value.request_id]

    with connected(client_config=lambda *_: reply({"sample_max_concurrent_requests": 1})) as (
        server,
        service,
    ):
        sampler = service.create_sampling_client(base_model="toy")
        server.answers["retrieve_future"] = poll

        async def dies() -> None:
            waiting = asyncio.ensure_future(sampler.sample_async(PROMPT, 1, PARAMS))
            await asyncio.sleep(0.05)
            assert not waiting.done()
            raise RuntimeError("the program around the sample broke")

        def run() -> None:
            with pytest.raises(RuntimeError, match="broke"):
                asyncio.run(dies())

        thread = threading.Thread(target=run)
        thread.start()
        thread.join(30)
        gc.collect()
        following = sampler.sample(PROMPT, 1, PARAMS)
        gate.open()
        assert len(following.result(timeout=30).sequences) == 1


def test_samples_wait_in_the_order_in_which_they_came() -> None:
    with connected(client_config=lambda *_: reply({"sample_max_concurrent_requests": 1})) as (
        server,
        service,
    ):
        sampler = service.create_sampling_client(base_model="toy")
        prompts = [types.ModelInput.from_ints([place]) for place in range(40)]
        futures = [sampler.sample(prompt, 1, PARAMS) for prompt in prompts]
        for future in futures:
            future.result(timeout=30)
    assert [value.prompt for value in server.values("asample")] == prompts


# ---- push-back ----


class Paused:
    """Tells when the client has understood that it is to wait."""

    def __init__(self) -> None:
        self.received = threading.Event()

    def emit(self, event: Event) -> None:
        if isinstance(event, SamplingPaused):
            self.received.set()


@pytest.mark.slow
def test_a_429_pauses_all_clients_of_that_server_and_key_and_no_others() -> None:
    arrivals: list[tuple[str, float]] = []
    paused = Paused()

    def submit(value: types.SampleRequest, request: Request) -> Reply:
        key = {name.lower(): text for name, text in request.headers.items()}["x-api-key"]
        arrivals.append((f"{key} {value.prompt.to_ints()[0]}", time.monotonic()))
        if len(arrivals) == 1:
            return reply({"detail": "later"}, status=429, headers={"retry-after": "1.5"})
        return server.on_asample(value, request)

    server = ScriptedServer(asample=submit)
    with over_http(server) as url:
        first = ServiceClient(base_url=url, api_key="tml-one", events=paused)
        second = ServiceClient(base_url=url + "/", api_key="tml-one")
        stranger = ServiceClient(base_url=url, api_key="tml-two")
        samplers = [one.create_sampling_client(base_model="toy") for one in (first, second, stranger)]
        prompts = [types.ModelInput.from_ints([place]) for place in range(3)]
        pending = [samplers[0].sample(prompts[0], 1, PARAMS)]
        assert paused.received.wait(30)
        pending += [samplers[place].sample(prompts[place], 1, PARAMS) for place in (1, 2)]
        for future in pending:
            assert len(future.result(timeout=60).sequences) == 1
        for service in (first, second, stranger):
            service.close("success").result(30)
    rejected, *later = arrivals
    assert rejected[0] == "tml-one 0"
    assert later[0][0] == "tml-two 2", "another key is not held back"
    assert sorted(name for name, _ in later[1:]) == ["tml-one 0", "tml-one 1"]
    assert all(at - rejected[1] >= 1.45 for _, at in later[1:]), "the server asked for 1.5 s"
