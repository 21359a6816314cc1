"""A long mixed load: training, saving, sampling, invalid requests and dropped connections, with memory over time."""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from server_side import MODEL, Connection, Server, connected, forward_backward, step

TOKENS = [5 + index % 200 for index in range(32)]
COUNTED = ("trained", "sampled", "saved", "refused", "dropped")
SHORT_LIVED = ("--fetched-retention-s", "2", "--result-retention-s", "4", "--maintenance-interval-s", "1",
               "--expired-retention-s", "8")  # fmt: skip
"""Short retention times, so that data expires during the load."""


async def soak(server: Server, seconds: float, report: Callable[[str], None]) -> dict[str, Any]:
    until = time.perf_counter() + seconds
    counts = dict.fromkeys(COUNTED, 0)

    async def train(connection: Connection) -> None:
        while time.perf_counter() < until:
            run_id = await connection.run()
            for number in range(1, 40, 3):
                await connection.finished("forward_backward", forward_backward(run_id, number, TOKENS, 4))
                await connection.finished("optim_step", step(run_id, number + 1))
                save = {"model_id": run_id, "seq_id": number + 2, "path": f"s{number}", "ttl_seconds": 1}
                await connection.finished("save_weights", save)
                counts["trained"] += 1
                counts["saved"] += 1
            await connection.finished("unload_model", {"model_id": run_id})

    async def sample(connection: Connection) -> None:
        session = (await connection.post("create_session", {}))["session_id"]
        made = {"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL}
        sampler = (await connection.post("create_sampling_session", made))["sampling_session_id"]
        for number in itertools.count(1):
            if time.perf_counter() >= until:
                return
            body = {
                "sampling_session_id": sampler,
                "seq_id": number,
                "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5 + number % 300, *TOKENS]}]},
                "sampling_params": {"max_tokens": 8, "stop": [], "seed": number},
            }
            await connection.finished("asample", body)
            counts["sampled"] += 1

    async def misbehave(connection: Connection) -> None:
        run_id = await connection.run()
        blocked = (await connection.post("optim_step", step(run_id, 2)))["request_id"]  # for number 1
        poll = json.dumps({"request_id": blocked}).encode()
        while time.perf_counter() < until:
            for name in ("asample", "forward_backward", "create_model", "nowhere"):
                status, _ = await connection.call(name, {"junk": "x" * 1000})
                if not 400 <= status < 500:
                    raise RuntimeError(f"an invalid request to {name} got {status}")
                counts["refused"] += 1
            async with connected(server, 6) as dropped:  # disconnects in the middle of a body or a poll
                for index, each in enumerate(dropped):
                    if index % 2:
                        each.writer.write(
                            b"POST /api/v1/create_session HTTP/1.1\r\nContent-Length: 99\r\n\r\n{"
                        )
                    else:
                        head = f"X-API-Key: {server.key}\r\nContent-Length: {len(poll)}\r\n\r\n"
                        each.writer.write(
                            b"POST /api/v1/retrieve_future HTTP/1.1\r\nHost: x\r\n" + head.encode() + poll
                        )
                    await each.writer.drain()
                await asyncio.sleep(0.02)
                counts["dropped"] += len(dropped)
            await asyncio.sleep(0.05)

    async def watch() -> list[tuple[float, list[float]]]:
        start, seen = time.perf_counter(), []
        interval = max(seconds / 30, 0.5)
        while time.perf_counter() < until:
            await asyncio.sleep(interval)
            seen.append((time.perf_counter() - start, server.resident_mb()))
            memory = " + ".join(f"{each:,.1f}" for each in seen[-1][1])
            cells = " | ".join(f"{count:,}" for count in counts.values())
            report(f"| {seen[-1][0]:,.0f} | {memory} | {cells} |")
        return seen

    report(f"| s | memory, MB | {' | '.join(counts)} |\n| --- | --- |{' --- |' * len(counts)}")
    async with connected(server, 5) as (one, two, three, four, five):
        *_, seen = await asyncio.gather(
            train(one), train(two), sample(three), sample(four), misbehave(five), watch()
        )
    return {"memory": seen, "growth": growth([sum(each) for _, each in seen]), **counts}


def growth(memory: Sequence[float]) -> float:
    """Returns the median of the last third over that of the middle third: the growth after the warm-up."""
    third = max(len(memory) // 3, 1)
    return statistics.median(memory[-third:]) / statistics.median(memory[third : 2 * third])
