"""Polls whose callers hang up are let go at once."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.requests import ClientDisconnect, Request

from tests.unit.engine.api.asgi import Client
from tinkex.engine.api.held import while_connected
from tinkex.engine.engine import Engine


class Line:
    """The connection of a caller, who stays on it until told otherwise."""

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.request = Request({"type": "http", "method": "POST", "headers": []}, self._receive)

    async def _receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}


class Wait:
    """Something that is waited for."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.given_up = False

    async def __call__(self) -> str:
        try:
            return await self.answer
        except asyncio.CancelledError:
            self.given_up = True
            raise


async def test_a_caller_who_stays_gets_the_answer_and_nothing_is_left_behind() -> None:
    line, wait = Line(), Wait()
    before = asyncio.all_tasks()
    asyncio.get_running_loop().call_soon(wait.answer.set_result, "here")
    assert await while_connected(line.request, wait()) == "here"
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before


async def test_a_caller_who_hangs_up_is_not_waited_for() -> None:
    line, wait = Line(), Wait()
    asyncio.get_running_loop().call_soon(line.left.set)
    with pytest.raises(ClientDisconnect):
        await while_connected(line.request, wait())
    assert wait.given_up
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()


async def test_a_call_that_is_ended_from_outside_ends_as_such() -> None:
    line, wait = Line(), Wait()
    call = asyncio.create_task(while_connected(line.request, wait()))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert wait.given_up


async def test_a_poll_whose_caller_hangs_up_is_let_go(ada: Client, engine: Engine) -> None:
    run = await asyncio.to_thread(ada.create)
    step = {"model_id": run, "seq_id": 2, "adam_params": {}}  # it waits for number 1
    waits = (await ada.acall("POST", "/api/v1/optim_step", step)).json["request_id"]
    body = json.dumps({"request_id": waits}).encode()
    sent: list[Any] = []
    left = asyncio.Event()
    pieces = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if not pieces:
            await left.wait()
            return {"type": "http.disconnect"}
        return pieces.pop()

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
    while not engine.stats().polls:  # noqa: ASYNC110 -- it is another task of this loop
        await asyncio.sleep(0)
    left.set()
    await poll
    assert not engine.stats().polls
    assert sent[0]["status"] == 400
