"""Measures what connected pages cost while a run trains: the server's CPU time with ten event streams and without."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from urllib.parse import urlencode

from server_side import Connection, Server, connected, forward_backward, served, step
from server_training import DATUMS, LORA, TOKENS

from tinkex.engine.model.catalog import DEFAULT_MODEL

STREAMS = 10


async def measure_streams(rounds: int, steps: int) -> dict[str, float]:
    """Returns CPU times per step: of the worker, and of the server with and without streams, in alternating rounds."""
    server_s: dict[bool, list[float]] = {False: [], True: []}
    worker_s: list[float] = []
    with served("--no-auth", model=DEFAULT_MODEL) as server:
        async with connected(server, 1) as [connection]:
            run_id, number = await connection.run(DEFAULT_MODEL, **LORA), 1
            for round_number in range(2 * rounds + 1):
                has_streams = bool(round_number % 2)
                async with _streams(server, run_id, STREAMS if has_streams else 0):
                    before = server.cpu_s()
                    for _ in range(steps):
                        await _train(connection, run_id, number)
                        number += 2
                    spent = [(now - then) / steps for now, then in zip(server.cpu_s(), before, strict=True)]
                if round_number:  # the first round is a warm-up
                    server_s[has_streams].append(spent[0])
                    worker_s.append(spent[1])
    without, with_streams = min(server_s[False]), min(server_s[True])
    return {
        "worker, CPU s/step": min(worker_s),
        "server without streams, CPU ms/step": 1000 * without,
        "server with ten streams, CPU ms/step": 1000 * with_streams,
        "CPU, streams : step": max(with_streams - without, 0.0) / min(worker_s),
    }


async def _train(connection: Connection, run_id: str, number: int) -> None:
    passed = await connection.post("forward_backward", forward_backward(run_id, number, TOKENS, DATUMS))
    stepped = await connection.post("optim_step", step(run_id, number + 1))
    await connection.result(passed["request_id"])
    await connection.result(stepped["request_id"])


@contextlib.asynccontextmanager
async def _streams(server: Server, run_id: str, count: int) -> AsyncIterator[None]:
    """Connects to the events of the overview and of a run's page, in turns, and reads what arrives."""
    series = urlencode({"run": run_id, "metric": "loss:mean"})
    paths = ["/dashboard/overview/events", f"/dashboard/series/events?{series}"]
    readers = [asyncio.create_task(_read(server, paths[index % 2])) for index in range(count)]
    try:
        yield
    finally:
        for reader in readers:
            reader.cancel()
        for ended in await asyncio.gather(*readers, return_exceptions=True):
            if isinstance(ended, Exception):  # a reader that was cancelled has none
                raise ended


async def _read(server: Server, path: str) -> None:
    reader, writer = await asyncio.open_connection(server.host, server.port)
    try:
        head = (
            f"GET {path} HTTP/1.1\r\nHost: {server.host}:{server.port}\r\nAccept: text/event-stream\r\n\r\n"
        )
        writer.write(head.encode())
        status = await reader.readuntil(b"\r\n")
        if b" 200 " not in status:
            raise RuntimeError(f"{path}: {status!r}")
        while await reader.read(65_536):
            pass
        raise RuntimeError(f"{path}: the stream ended")
    finally:
        writer.close()
