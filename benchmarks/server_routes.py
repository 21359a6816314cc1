"""Compares samples and streams through the OpenAI route with the same ones through the native API, on a tiny model.

A tiny model makes the server's own work a large part of a sample, so the ratios are upper bounds for larger ones.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent)]

from server_side import MODEL, Connection, Server, connected, served  # noqa: E402

LENGTHS = (64, 256)
REQUESTS = 10
"""Pairs of requests in a round."""
WARM_UP = 5
SETTLE_S = 0.005
PROMPT = list(range(5, 37))
TEXT = "What is the capital of France?"


def compare_routes(rounds: int) -> dict[str, float]:
    """Measures latency and CPU time of completions and chats as multiples of those of the native sample or stream."""
    with served() as server:
        return asyncio.run(_compare(server, rounds))


async def _compare(server: Server, rounds: int) -> dict[str, float]:
    found: dict[str, float] = {}
    async with connected(server, 1) as [connection]:
        prompts = {"completion": PROMPT, "chat": await _chat_prompt(connection)}
        for num_tokens, name, stream in itertools.product(LENGTHS, prompts, (False, True)):
            calls = (
                partial(_native, connection, prompts[name], num_tokens, stream=stream),
                partial(_routed, connection, name, num_tokens, stream=stream),
            )
            for call in calls * WARM_UP:
                await call()
            ratios = []
            for number in range(rounds * REQUESTS):
                # The two take turns in being first, so that other load on the machine affects both in the same way.
                order = (0, 1) if number % 2 else (1, 0)
                measured = {which: await _measure(server, calls[which]) for which in order}
                ratios.append(
                    [routed / native for native, routed in zip(measured[0], measured[1], strict=True)]
                )
            what = f"{'streamed ' if stream else ''}{name} of {num_tokens} tokens"
            for quantity, values in zip(("time", "CPU"), zip(*ratios, strict=True), strict=True):
                found[f"{quantity}, {what} : native"] = statistics.median(values)
    return found


async def _measure(server: Server, call: Callable[[], Awaitable[None]]) -> tuple[float, float]:
    clock, cpu = time.perf_counter(), _cpu_s(server)
    await call()
    elapsed = time.perf_counter() - clock
    await asyncio.sleep(SETTLE_S)  # what follows a request belongs to it
    return elapsed, _cpu_s(server) - cpu


def _cpu_s(server: Server) -> float:
    """The CPU time of the server's threads, in nanoseconds of the scheduler: the clock ticks of other sources are too coarse."""
    threads = [path for each in server.processes() for path in Path(f"/proc/{each.pid}/task").iterdir()]
    return sum(int((path / "schedstat").read_text().split()[0]) for path in threads) / 1e9


async def _chat_prompt(connection: Connection) -> list[int]:
    """The tokens of the chat, so that the native sample is that of the same prompt."""
    body = {**_chat_body(1), "return_token_ids": True}
    answer = await connection.post("/v1/chat/completions", body)
    tokens: list[int] = answer["choices"][0]["prompt_token_ids"]
    return tokens


async def _native(connection: Connection, tokens: list[int], num_tokens: int, *, stream: bool) -> None:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": tokens}]}
    params = {"max_tokens": num_tokens, "seed": 7, "stop": ["no such text"]}
    body = {"prompt": prompt, "sampling_params": params, "base_model": MODEL, "num_samples": 1}
    if stream:
        await connection.stream("stream_sample", body)
    else:
        await connection.finished("asample", body)


async def _routed(connection: Connection, name: str, num_tokens: int, *, stream: bool) -> None:
    path, body = "/v1/chat/completions", _chat_body(num_tokens)
    if name == "completion":
        path, body = "/v1/completions", {**body, "prompt": PROMPT}
        del body["messages"]
    if stream:
        await connection.stream(path, {**body, "stream": True})
    else:
        await connection.post(path, body)


def _chat_body(num_tokens: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": TEXT}]
    return {
        "model": MODEL,
        "messages": messages,
        "max_tokens": num_tokens,
        "seed": 7,
        "stop": ["no such text"],
    }
