"""Long polls end as soon as the client disconnects."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.requests import ClientDisconnect, Request

from tests.unit.engine.api.asgi import Client
from tinkex.engine.api.long_poll import cancel_on_disconnect
from tinkex.engine.engine import Engine


class Connection:
    """A client connection that stays open until ``disconnected`` is set."""

    def __init__(self) -> None:
        self.disconnected = asyncio.Event()
        self.request = Request({"type": "http", "method": "POST", "headers": []}, self._receive)

    async def _receive(self) -> dict[str, Any]:
        await self.disconnected.wait()
        return {"type": "http.disconnect"}


class Handler:
    """A handler that waits."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.cancelled = False

    async def __call__(self) -> str:
        try:
            return await self.answer
        except asyncio.CancelledError:
            self.cancelled = True
            raise


async def test_a_connected_client_gets_the_result_and_no_task_is_left() -> None:
    connection, handler = Connection(), Handler()
    before = asyncio.all_tasks()
    asyncio.get_running_loop().call_soon(handler.answer.set_result, "here")
    assert await cancel_on_disconnect(connection.request, handler()) == "here"
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before


async def test_the_handler_is_cancelled_when_the_client_disconnects() -> None:
    connection, handler = Connection(), Handler()
    asyncio.get_running_loop().call_soon(connection.disconnected.set)
    with pytest.raises(ClientDisconnect):
        await cancel_on_disconnect(connection.request, handler())
    assert handler.cancelled
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()


async def test_a_cancellation_from_outside_is_propagated() -> None:
    connection, handler = Connection(), Handler()
    call = asyncio.create_task(cancel_on_disconnect(connection.request, handler()))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert handler.cancelled


async def test_a_poll_ends_when_its_client_disconnects(ada: Client, engine: Engine) -> None:
    run = await asyncio.to_thread(ada.create)
    step = {"model_id": run, "seq_id": 2, "adam_params": {}}  # it waits for seq_id 1
    waits = (await ada.acall("POST", "/api/v1/optim_step", step)).json["request_id"]
    body = json.dumps({"request_id": waits}).encode()
    sent: list[Any] = []
    disconnected = asyncio.Event()
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if not messages:
            await disconnected.wait()
            return {"type": "http.disconnect"}
        return messages.pop()

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/api/v1/retrieve_future",
        "query_string": b"",
        "headers": [(b"x-api-key", engine.api_key.encode())],
        "client": ("127.0.0.1", 1),
    }
    poll = asyncio.create_task(ada.app(scope, receive, send))
    while not engine.stats().polls:  # noqa: ASYNC110 -- set by another task of this loop
        await asyncio.sleep(0)
    disconnected.set()
    await poll
    assert not engine.stats().polls
    assert sent[0]["status"] == 499
