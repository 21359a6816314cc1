from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.unit.engine.api.asgi import PROTO, Client
from tests.unit.engine.api.test_sampling import request, sampler
from tinkex._wire import proto as wire_proto
from tinkex.engine.engine import Engine
from tinkex.engine.store import UsageKind

Event = tuple[str, dict[str, Any]]


def stream_request(sampler_id: str, seq_id: int = 0, num_samples: int = 1, **params: Any) -> dict[str, Any]:
    return {**request(sampler_id, seq_id, num_samples, **params), "prompt_logprobs": False}


def events(body: bytes) -> list[Event]:
    found = []
    for block in body.decode().split("\n\n"):
        if block.startswith("event: "):
            name, data = block.split("\n")
            found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


class Connection:
    """A client that reads as fast as the test lets it."""

    def __init__(self) -> None:
        self.events_read: list[Event] = []
        self.may_read = asyncio.Event()
        self.may_read.set()
        self.arrived = asyncio.Event()
        self.disconnected = asyncio.Event()

    async def wait_for(self, count: int) -> None:
        while len(self.events_read) < count:
            self.arrived.clear()
            await asyncio.wait_for(self.arrived.wait(), 60)


@asynccontextmanager
async def connect(client: Client, body: dict[str, Any]) -> AsyncIterator[Connection]:
    connection = Connection()
    content = json.dumps(body).encode()
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/api/v1/stream_sample",
        "raw_path": b"/api/v1/stream_sample",
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json"), (b"x-api-key", (client.key or "").encode())],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }
    messages = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await connection.disconnected.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        await connection.may_read.wait()
        connection.events_read += events(message.get("body", b""))
        connection.arrived.set()

    call = asyncio.create_task(client.app(scope, receive, send))
    try:
        yield connection
    finally:
        connection.disconnected.set()
        await asyncio.wait_for(call, 60)


def test_a_stream_has_the_tokens_that_a_sample_returns(ada: Client) -> None:
    sampler_id = sampler(ada)
    params = {"max_tokens": 12, "seed": 7}
    submitted = ada.post("asample", stream_request(sampler_id, 0, 2, **params))
    ids = submitted.json["sample_sequence_ids"]
    whole = wire_proto.decode_sample_response(ada.result(submitted, accept=PROTO).body, ids)
    answer = ada.post("stream_sample", stream_request(sampler_id, 1, 2, **params))
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    events_read = events(answer.body)
    assert events_read[0][0] == "accepted"
    assert events_read[-1] == (
        "done",
        {
            "stop_reasons": ["length", "length"],
            "num_tokens": 24,
            "num_prompt_tokens": 3,
            "prompt_cache_hit_tokens": events_read[-1][1]["prompt_cache_hit_tokens"],
        },
    )
    tokens = [data for name, data in events_read if name == "token"]
    for sample, sequence in enumerate(whole.sequences):
        mine = [data for data in tokens if data["sample"] == sample]
        assert [data["index"] for data in mine] == list(range(12))
        assert [data["token"] for data in mine] == sequence.tokens
        assert [data["logprob"] for data in mine] == sequence.logprobs
        assert [data.get("stop_reason") for data in mine] == [None] * 11 + ["length"]


@pytest.mark.slow
def test_the_first_token_is_sent_before_the_last_is_sampled(ada: Client, engine: Engine) -> None:
    sampler_id = sampler(ada)

    async def is_sent_early(seq_id: int) -> bool:
        async with connect(ada, stream_request(sampler_id, seq_id, max_tokens=400)) as connection:
            await connection.wait_for(2)
            request_id = connection.events_read[0][1]["request_id"]
            assert connection.events_read[1][0] == "token"
            is_running = engine.store.futures.outcome(request_id) is None
            while connection.events_read[-1][0] != "done":
                await connection.wait_for(len(connection.events_read) + 1)
            num_tokens = [name for name, _ in connection.events_read].count("token")
            assert num_tokens == connection.events_read[-1][1]["num_tokens"]
            return is_running

    # On a busy machine this thread may get to run only after the last token.
    assert any(asyncio.run(is_sent_early(seq_id)) for seq_id in range(20))


def test_a_disconnect_cancels_the_sample(ada: Client, engine: Engine) -> None:
    async def run(seq_id: int) -> str:
        async with connect(ada, stream_request(sampler_id, seq_id, max_tokens=450)) as connection:
            await connection.wait_for(2)
            request_id: str = connection.events_read[0][1]["request_id"]
        return request_id

    sampler_id = sampler(ada)
    for seq_id in range(50):  # on a busy machine the sample may complete before the disconnect arrives
        request_id = asyncio.run(run(seq_id))
        answer = ada.post("retrieve_future", {"request_id": request_id})
        while answer.status == 408:
            answer = ada.post("retrieve_future", {"request_id": request_id})
        if b"cancelled" in answer.body:
            break
    assert b"cancelled" in answer.body
    assert [model.batch.num_sequences for model in engine.stats().models] == [0]


def test_a_slow_client_blocks_no_other_and_gets_all_tokens(ada: Client) -> None:
    async def run() -> None:
        async with connect(ada, stream_request(sampler_id, 0, max_tokens=40)) as slow:
            await slow.wait_for(1)
            slow.may_read.clear()
            async with connect(ada, stream_request(sampler_id, 1, max_tokens=60)) as quick:
                while not quick.events_read or quick.events_read[-1][0] != "done":
                    await quick.wait_for(len(quick.events_read) + 1)
            slow.may_read.set()
            while slow.events_read[-1][0] != "done":
                await slow.wait_for(len(slow.events_read) + 1)
            tokens = [data for name, data in slow.events_read if name == "token"]
            assert [data["index"] for data in tokens] == list(range(40))

    sampler_id = sampler(ada)
    asyncio.run(run())


@pytest.mark.parametrize("name", ["prompt_logprobs", "topk_sample_logprobs"])
def test_fields_that_streams_do_not_support_are_rejected_with_an_error_that_names_them(
    ada: Client, name: str
) -> None:
    answer = ada.post(
        "stream_sample", {**stream_request(sampler(ada)), name: 1 if name.startswith("top") else True}
    )
    assert answer.status == 400
    assert name in answer.detail


def test_another_users_sampler_is_not_found(ada: Client, bob: Client) -> None:
    assert bob.post("stream_sample", stream_request(sampler(ada))).status == 404


def test_streamed_tokens_are_counted_in_usage(ada: Client, engine: Engine) -> None:
    sampler_id = sampler(ada)
    row = engine.store.samplers.get(sampler_id)
    assert row is not None

    def sampled() -> int:
        used = engine.store.usage.between(row.owner, 0, 1e12)
        return sum(amount for account, amount in used if account.kind is UsageKind.SAMPLE)

    ada.post("stream_sample", stream_request(sampler_id, 0, max_tokens=3))
    before = sampled()
    ada.post("stream_sample", stream_request(sampler_id, 1, max_tokens=9))
    assert sampled() - before == 9
