"""Large replies: bounded per user until they are read, and made while the event loop serves others."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.engine.api.asgi import PROTO, Client
from tests.unit.engine.store.test_store import future
from tinkex._wire.proto import encode_forward_backward
from tinkex.engine.api.app import build_app
from tinkex.engine.api.pages import MAX_PAGE_BYTES
from tinkex.engine.api.replies import MAX_SMALL_BYTES, PART_BYTES, REPLIES_PER_USER
from tinkex.engine.config import EngineConfig
from tinkex.engine.engine import Engine
from tinkex.engine.store import Outcome, ResultFormat
from tinkex.types import Datum, ForwardBackwardRequest, ModelInput

MAX_BODY = 200_000
METADATA = {"note": "x" * 60_000}


@pytest.fixture(scope="module")
def engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    opened = Engine(
        EngineConfig(
            home=tmp_path_factory.mktemp("replies"),
            models={"tiny": str(tiny_model)},
            max_body_bytes=MAX_BODY,
        )
    )
    opened.start()
    opened.store.users.add_key("bob", "tml-bob", 0.0)
    yield opened
    opened.close()


class Reader:
    """A client on the network that reads the reply to one poll when it is told to."""

    def __init__(self, app: Any, key: str, request_id: str) -> None:
        self.parts: list[bytes] = []
        self.status = 0
        self.reads = asyncio.Semaphore(0)
        self.task = asyncio.create_task(self._call(app, key, json.dumps({"request_id": request_id}).encode()))

    async def _call(self, app: Any, key: str, body: bytes) -> None:
        headers = {"content-type": "application/json", "x-api-key": key, "accept": "application/x-protobuf"}
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": "/api/v1/retrieve_future",
            "query_string": b"",
            "root_path": "",
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                self.status = message["status"]
            elif self.status == 200:
                await self.reads.acquire()
                self.parts.append(message["body"])

        await app(scope, receive, send)

    def read(self) -> None:
        for _ in range(1000):
            self.reads.release()

    async def answered(self) -> int:
        while not self.status:  # noqa: ASYNC110 -- set by the application, which this loop runs
            await asyncio.sleep(0.001)
        return self.status


def large_result(engine: Engine, size: int, owner: str = "local") -> str:
    """The id of an operation with a result of so many bytes."""
    row = replace(future(f"large-{owner}-{size}", owner, size), owner=owner)
    engine.store.futures.accept(row)
    engine.store.futures.finish(
        [(row.request_id, Outcome.done(bytes(size), ResultFormat.PROTO))], now=time.time()
    )
    return row.request_id


def test_replies_that_a_user_does_not_read_are_bounded_and_others_are_served(engine: Engine) -> None:
    app = build_app(engine)
    size = MAX_BODY
    request_id, others = large_result(engine, size), large_result(engine, size, "bob")

    async def check() -> None:
        readers = [Reader(app, engine.api_key, request_id) for _ in range(REPLIES_PER_USER)]
        assert {await reader.answered() for reader in readers} == {200}
        rejected = Reader(app, engine.api_key, request_id)
        assert await rejected.answered() == 429
        bob = Reader(app, "tml-bob", others)
        bob.read()
        assert await bob.answered() == 200
        await bob.task
        assert len(b"".join(bob.parts)) == size
        assert max(map(len, bob.parts)) == PART_BYTES
        readers[0].read()
        await readers[0].task
        again = Reader(app, engine.api_key, request_id)
        assert await again.answered() == 200
        for reader in (*readers, again):
            reader.read()
            await reader.task
            assert b"".join(reader.parts) == bytes(size)

    asyncio.run(check())


def test_a_reply_larger_than_the_limit_is_sent_when_it_is_the_only_one(engine: Engine) -> None:
    app = build_app(engine)
    size = 2 * REPLIES_PER_USER * MAX_BODY
    request_id = large_result(engine, size)

    async def check() -> None:
        reader = Reader(app, engine.api_key, request_id)
        reader.read()
        await reader.task
        assert len(b"".join(reader.parts)) == size

    asyncio.run(check())


@pytest.mark.slow
def test_health_polls_complete_while_a_result_is_converted_for_a_client_without_protobuf(
    engine: Engine,
) -> None:
    ada = Client(build_app(engine), engine.api_key)
    run = ada.create()
    datum = Datum(ModelInput.from_ints([5] * 400), {"target_tokens": [6] * 400})
    request = ForwardBackwardRequest(model_id=run, seq_id=1, data=[datum] * 20, loss_fn="cross_entropy")
    submitted = ada.post("forward_backward", encode_forward_backward(request), content_type=PROTO)
    request_id = submitted.json["request_id"]
    assert ada.result(submitted, accept=PROTO).status == 200
    holding, release = threading.Event(), threading.Event()

    def hold() -> None:
        holding.set()
        assert release.wait(60)

    async def check() -> None:
        held = asyncio.create_task(engine.run_on_thread("local", hold))
        await asyncio.to_thread(holding.wait, 60)
        poll = asyncio.create_task(ada.acall("POST", "/api/v1/retrieve_future", {"request_id": request_id}))
        for _ in range(5):
            assert (await ada.acall("GET", "/api/v1/healthz")).status in {200, 503}
        assert not poll.done(), "it waits for its turn on the user's threads, not on the loop"
        release.set()
        await held
        assert len((await poll).body) > MAX_SMALL_BYTES

    asyncio.run(check())


def test_searches_of_one_user_do_not_delay_those_of_another(engine: Engine) -> None:
    app = build_app(engine)
    ada, bob = Client(app, engine.api_key), Client(app, "tml-bob")
    holding, release = threading.Event(), threading.Event()

    def hold() -> None:
        holding.set()
        assert release.wait(60)

    async def check() -> None:
        held = asyncio.create_task(engine.run_on_thread("local", hold))
        await asyncio.to_thread(holding.wait, 60)
        searches = [asyncio.create_task(ada.acall("POST", "/api/v1/sessions/search", {})) for _ in range(100)]
        assert (await bob.acall("POST", "/api/v1/sessions/search", {})).status == 200
        assert not any(search.done() for search in searches)
        release.set()
        await held
        assert {answer.status for answer in await asyncio.gather(*searches)} == {200}

    asyncio.run(check())


def create_run(client: Client, session: str, number: int) -> str:
    """The id of a new run with much metadata."""
    request = {
        "session_id": session,
        "model_seq_id": number,
        "base_model": "tiny",
        "lora_config": {"rank": 1, "seed": 1},
        "user_metadata": METADATA,
        "type": "create_model",
    }
    run_id: str = client.result(client.post("create_model", request)).json["model_id"]
    return run_id


@pytest.mark.slow
def test_a_page_of_runs_is_bounded_in_bytes_and_the_next_one_follows_it(engine: Engine) -> None:
    client = Client(build_app(engine), "tml-bob")
    session = client.session()
    runs = [create_run(client, session, number) for number in range(20)]
    found: list[str] = []
    while True:
        answer = client.get(f"training_runs?limit=1000&offset={len(found)}")
        assert len(answer.body) < MAX_PAGE_BYTES + 10_000
        page = answer.json
        assert page["cursor"]["total_count"] >= len(runs)
        found += [run["training_run_id"] for run in page["training_runs"]]
        if len(found) == page["cursor"]["total_count"]:
            break
        assert page["cursor"]["limit"] == len(page["training_runs"]) > 0
    assert len(found) == len(set(found))
    assert set(runs) <= set(found)
