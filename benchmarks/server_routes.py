"""Compares samples through the OpenAI route with the same samples through the native API, on a tiny model.

A tiny model makes the server's own work a large part of a sample, so the ratios are upper bounds for larger ones.
"""

from __future__ import annotations

import asyncio
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
REQUESTS = 25
PROMPT = list(range(5, 37))
TEXT = "What is the capital of France?"


def compare_routes(rounds: int) -> dict[str, float]:
    """Measures latency and CPU time of a completion and of a chat as multiples of the native sample's."""
    with served() as server:
        return asyncio.run(_compare(server, rounds))


async def _compare(server: Server, rounds: int) -> dict[str, float]:
    found: dict[str, float] = {}
    async with connected(server, 1) as [connection]:
        prompts = {"completion": PROMPT, "chat": await _chat_prompt(connection)}
        for num_tokens in LENGTHS:
            ratios: dict[str, list[tuple[float, float]]] = {"completion": [], "chat": []}
            for number in range(rounds + 1):
                for name, call in (("completion", _completion), ("chat", _chat)):
                    native = await _measure(server, partial(_native, connection, prompts[name], num_tokens))
                    routed = await _measure(server, partial(call, connection, num_tokens))
                    if number:  # the first round is a warm-up
                        ratios[name].append((routed[0] / native[0], routed[1] / native[1]))
            for name, pairs in ratios.items():
                what = f"{name} of {num_tokens} tokens"
                found[f"time, {what} : native"] = statistics.median(time for time, _ in pairs)
                found[f"CPU, {what} : native"] = statistics.median(cpu for _, cpu in pairs)
    return found


async def _measure(server: Server, call: Callable[[], Awaitable[None]]) -> tuple[float, float]:
    clock, cpu = time.perf_counter(), sum(server.cpu_s())
    for _ in range(REQUESTS):
        await call()
    return time.perf_counter() - clock, sum(server.cpu_s()) - cpu


async def _chat_prompt(connection: Connection) -> list[int]:
    """The tokens of the chat, so that the native sample is that of the same prompt."""
    body = {**_chat_body(1), "return_token_ids": True}
    answer = await connection.post("/v1/chat/completions", body)
    tokens: list[int] = answer["choices"][0]["prompt_token_ids"]
    return tokens


async def _native(connection: Connection, tokens: list[int], num_tokens: int) -> None:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": tokens}]}
    params = {"max_tokens": num_tokens, "seed": 7, "stop": ["no such text"]}
    await connection.finished(
        "asample", {"prompt": prompt, "sampling_params": params, "base_model": MODEL, "num_samples": 1}
    )


async def _completion(connection: Connection, num_tokens: int) -> None:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": num_tokens, "seed": 7, "stop": ["no such text"]}
    await connection.post("/v1/completions", body)


async def _chat(connection: Connection, num_tokens: int) -> None:
    await connection.post("/v1/chat/completions", _chat_body(num_tokens))


def _chat_body(num_tokens: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": TEXT}]
    return {
        "model": MODEL,
        "messages": messages,
        "max_tokens": num_tokens,
        "seed": 7,
        "stop": ["no such text"],
    }
