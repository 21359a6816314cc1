"""Polls whose callers hang up are let go at once."""

from __future__ import annotations

import asyncio
import json
import socket
import time
import urllib.request
from typing import Any

import pytest
from starlette.requests import ClientDisconnect, Request

from tests.servers import ServedEngine
from tinkex.engine.api.held import while_connected


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


def test_a_poll_on_a_closed_connection_is_let_go(served_engine: ServedEngine) -> None:
    def ask(path: str, body: object = None) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        headers = {"X-API-Key": served_engine.key, "Content-Type": "application/json"}
        with urllib.request.urlopen(
            urllib.request.Request(f"{served_engine.url}{path}", data, headers), timeout=60
        ) as response:
            return bytes(response.read())

    def polls() -> int:
        text = ask("/metrics").decode()
        return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("tinkex_polls "))

    session = json.loads(ask("/api/v1/create_session", {}))["session_id"]
    create = {
        "session_id": session,
        "model_seq_id": 0,
        "base_model": "tiny/llama",
        "lora_config": {"rank": 1},
    }
    ask("/api/v1/create_model", create)
    step = {"model_id": f"{session}:train:0", "seq_id": 2, "adam_params": {}}  # it waits for number 1
    waits = json.loads(ask("/api/v1/optim_step", step))["request_id"]
    before = polls()
    body = json.dumps({"request_id": waits}).encode()
    head = f"POST /api/v1/retrieve_future HTTP/1.1\r\nHost: x\r\nX-API-Key: {served_engine.key}\r\nContent-Length: {len(body)}\r\n\r\n"
    host, port = served_engine.url.removeprefix("http://").split(":")
    deadline = time.monotonic() + 20  # less than a poll is held
    with socket.create_connection((host, int(port))) as wire:
        wire.sendall(head.encode() + body)
        while polls() == before:
            assert time.monotonic() < deadline
    while polls() > before:
        assert time.monotonic() < deadline
