"""Thousands of concurrent samples: nothing else waits for them, all of them end, and each costs little."""

from __future__ import annotations

import asyncio
import itertools
import threading
import tracemalloc
from typing import Any

import pytest

from tests.scripted import ScriptedServer
from tests.unit.transport.loopback import Seen, loopback
from tinkex import ServiceClient, types
from tinkex._runtime import await_future, background
from tinkex.clients.session import Session
from tinkex.testing import Reply, Request, reply

pytestmark = pytest.mark.slow

PARAMS = types.SamplingParams(max_tokens=2)
POLLS = 2000


class Turns:
    """A server over real sockets that keeps every poll for a sample until the test releases them."""

    def __init__(self) -> None:
        self.scripted = ScriptedServer()
        self.held = 0
        self.let_go = asyncio.Event()
        self._news = asyncio.Condition()

    async def speak(self, seen: Seen, writer: asyncio.StreamWriter) -> None:
        if seen.headers.get("x-tinker-request-type") == "Sample":
            self.held += 1
            await self._tell()
            await self.let_go.wait()
        answer = self.scripted.handle(Request(seen.method, seen.target, seen.headers, seen.body))
        assert isinstance(answer, Reply)
        await self._tell()
        head = [f"HTTP/1.1 {answer.status} Whatever", f"content-length: {len(answer.body)}"]
        head += [f"{name}: {value}" for name, value in answer.headers.items()]
        writer.write("\r\n".join([*head, "", ""]).encode() + answer.body)

    async def until(self, true: Any) -> None:
        async with self._news:
            await self._news.wait_for(true)

    async def _tell(self) -> None:
        async with self._news:
            self._news.notify_all()

    @property
    def heartbeats(self) -> int:
        return len(self.scripted.values("session_heartbeat"))


async def test_two_thousand_pending_polls_delay_neither_heartbeats_nor_submissions() -> None:
    server = Turns()
    async with loopback(server.speak) as listening:
        service = ServiceClient(base_url=listening.url, api_key="tml-x")
        training = await service.create_lora_training_client_async("toy", rank=8)
        sampler = await training.save_weights_and_get_sampling_client_async()
        session = Session(service.holder.caller, heartbeat_interval_s=0.02)
        await await_future(background().submit(session.opened()))
        prompt = types.ModelInput.from_ints([1, 2])
        samples = [asyncio.wrap_future(sampler.sample(prompt, 1, PARAMS)) for _ in range(POLLS)]
        await server.until(lambda: server.held == POLLS)
        # every poll is kept: what follows ends only because it does not stand in line behind them
        before = server.heartbeats
        datum = types.Datum(prompt, {"target_tokens": [2, 3]})
        passed = await (await training.forward_backward_async([datum], "cross_entropy"))
        assert passed.metrics["loss:sum"] == 3.0
        await server.until(lambda: server.heartbeats >= before + 3)
        await (await training.optim_step_async(types.AdamParams()))
        assert not any(sample.done() for sample in samples)
        server.let_go.set()
        responses = await asyncio.gather(*samples)
        assert len(responses) == POLLS
        assert all(response.sequences[0].tokens == [1, 2] for response in responses)
        await service.close("success")


class Kept:
    """A server in memory that keeps the results of samples until the test releases them."""

    def __init__(self) -> None:
        self.scripted = ScriptedServer(
            client_config=lambda value, request: reply({"sample_max_concurrent_requests": 10_000}),
            retrieve_future=self.retrieve,
        )
        self.held = 0
        self.changed = threading.Condition()
        self.gate: asyncio.Event | None = None

    async def retrieve(self, value: types.FutureRetrieveRequest, request: Request) -> Reply:
        if self.gate is None:
            self.gate = asyncio.Event()
        with self.changed:
            self.held += 1
            self.changed.notify_all()
        await self.gate.wait()
        return self.scripted.results[value.request_id]

    def wait_for(self, held: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.held >= held, timeout=90)

    def let_go(self) -> None:
        assert self.gate is not None
        background().loop.call_soon_threadsafe(self.gate.set)


@pytest.mark.parametrize("count", [400])
def test_memory_grows_with_the_samples_in_flight_and_by_less_than_20_kb_each(count: int) -> None:
    server = Kept()
    with ServiceClient(transport=server.scripted.transport) as service:
        sampler = service.create_sampling_client(base_model="toy")
        prompts = [types.ModelInput.from_ints([place, *range(255)]) for place in range(2 * count)]
        tracemalloc.start()
        try:
            sizes = [tracemalloc.get_traced_memory()[0]]
            futures = []
            for part in (prompts[:count], prompts[count:]):
                futures += [sampler.sample(prompt, 1, PARAMS) for prompt in part]
                server.wait_for(len(futures))
                sizes.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
        first, second = (later - earlier for earlier, later in itertools.pairwise(sizes))
        assert first / count < 20_000
        assert second < 1.5 * first
        server.let_go()
        assert [future.result(timeout=90).sequences[0].tokens[0] for future in futures] == list(
            range(2 * count)
        )


def test_cancelled_samples_are_reported_in_batches() -> None:
    """Never more in flight than the server said, and every one of them."""
    reported: list[str] = []
    under_way: list[int] = []
    now = 0

    async def cancel(value: types.CancelFutureRequest, request: Request) -> Reply:
        nonlocal now
        now += 1
        under_way.append(now)
        await asyncio.sleep(0.001)
        now -= 1
        reported.append(value.request_id)
        return reply({})

    server = Kept()
    server.scripted.answers["client_dynamic_config"] = lambda value, request: reply(
        {"sample_cancel_enabled": True, "sample_cancel_max_batch_size": 8}
    )
    server.scripted.answers["cancel_future"] = cancel
    with ServiceClient(transport=server.scripted.transport) as service:
        sampler = service.create_sampling_client(base_model="toy")
        futures = [sampler.sample(types.ModelInput.from_ints([1]), 1, PARAMS) for _ in range(50)]
        server.wait_for(50)
        assert all(future.cancel() for future in futures[:45])
        while len(reported) < 45:
            background().run(asyncio.sleep(0.005))
        server.let_go()
        assert [future.result(timeout=30).sequences[0].tokens for future in futures[45:]] == [[1]] * 5
    assert sorted(reported) == sorted({f"req-{place}" for place in range(45)})
    assert max(under_way) <= 8
    assert max(under_way) > 1
