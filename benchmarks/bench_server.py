"""What the server itself costs: latency, throughput, held polls, training through it, and memory under a long mixed load.

    python benchmarks/bench_server.py [--seconds N] [--polls N] [--json FILE] [--only CASE ...]
    python benchmarks/bench_server.py --soak SECONDS [--json FILE]

operations  a server with a tiny model, in a process of its own on the loopback, journal on. The operation is an optimizer
            step without a gradient: accepted, flushed to disk, run, recorded and fetched, with next to nothing to
            compute; then the same with an engine that computes nothing at all, which leaves the server's own cost.
polls       thousands of polls for results that do not come, their memory, and how soon one is woken.
training    steps through the server beside the same steps of the bare engine, on the default model.

Processor time is of the server's processes and does not depend on what else the machine does; the rest does.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent)]

from server_side import Connection, Server, connected, served, step  # noqa: E402
from server_soak import SHORT_LIVED, soak  # noqa: E402
from server_training import compare  # noqa: E402

CLIENTS = (1, 16, 256)
SECONDS, POLLS, PROBES = 5.0, 5000, 50
CASES = ("operations", "polls", "training")
AIMS = {"memory, MB": 300.0, "wake max, ms": 50.0, "time, served : bare": 1.05, "CPU, served : bare": 1.05}
"""What figures are to stay below."""


# ---- operations: submit → result


async def operations(server: Server, clients: int, seconds: float) -> dict[str, float]:
    async with connected(server, clients) as connections:
        runs = await asyncio.gather(*(connection.run() for connection in connections))
        latencies: list[float] = []

        async def work(connection: Connection, run_id: str, until: float) -> None:
            for number in itertools.count(1):
                began = time.perf_counter()
                if began >= until:
                    return
                await connection.finished("optim_step", step(run_id, number))
                latencies.append(time.perf_counter() - began)

        began, cpu = time.perf_counter(), server.cpu_s()
        await asyncio.gather(
            *(work(c, run, began + seconds) for c, run in zip(connections, runs, strict=True))
        )
        took = time.perf_counter() - began
        used = [after - before for after, before in zip(server.cpu_s(), cpu, strict=True)]
    ordered = sorted(latencies)
    return {
        "operations/s": len(ordered) / took,
        "p50, ms": 1000 * ordered[len(ordered) // 2],
        "p99, ms": 1000 * ordered[int(len(ordered) * 0.99)],
        "CPU, ms/operation": 1000 * used[0] / len(ordered),
        "CPU of the worker, ms/operation": 1000 * sum(used[1:]) / len(ordered),
    }


def measure_operations(seconds: float) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for clients in CLIENTS:
        for idle in (False, True):
            with served(idle=idle) as server:
                figures = asyncio.run(operations(server, clients, seconds))
            engine = "nothing" if idle else "tiny model"
            if not found:
                print(f"| engine | clients | {' | '.join(figures)} |\n| --- | --- |{' --- |' * len(figures)}")
            found[f"{engine}, {clients} clients"] = figures
            cells = " | ".join(f"{figure:,.1f}" for figure in figures.values())
            print(f"| {engine} | {clients} | {cells} |", flush=True)
    return found


# ---- polls: futures that wait


async def polls(server: Server, count: int) -> dict[str, float]:
    before = sum(server.resident_mb())  # connections, operations and polls are all counted
    async with connected(server, count) as waiting, connected(server, 2) as (probe, poller):
        run_id, other = await probe.run(), await probe.run()
        ids = [(await probe.post("optim_step", step(run_id, 2 + n)))["request_id"] for n in range(count)]
        held = [
            asyncio.create_task(
                connection.result(request_id)
            )  # asks again when a poll has lasted long enough
            for connection, request_id in zip(waiting, ids, strict=True)
        ]
        while await held_polls(server) < count:  # noqa: ASYNC110 -- it is another process
            await asyncio.sleep(0.1)
        with_polls = sum(server.resident_mb())
        delays = [await _wake(probe, poller, other, 2 * n + 1) for n in range(PROBES)]
        began = time.perf_counter()
        await probe.post("optim_step", step(run_id, 1))
        await asyncio.gather(*held)
        took = time.perf_counter() - began
    ordered = sorted(delays)
    return {
        "held": float(count),
        "memory, MB": with_polls - before,
        "memory of the server, MB": with_polls,
        "wake p50, ms": 1000 * ordered[len(ordered) // 2],
        "wake max, ms": 1000 * ordered[-1],
        "all delivered, s": took,
    }


async def _wake(probe: Connection, poller: Connection, run_id: str, number: int) -> float:
    """How long after a result can be there a poll that waits for it is answered.

    A poll waits for an operation whose predecessor is missing; the time runs from when the predecessor is sent, so it
    holds both operations as well: the real delay is shorter.
    """
    waits = (await probe.post("optim_step", step(run_id, number + 1)))["request_id"]
    answer = asyncio.create_task(poller.call("retrieve_future", {"request_id": waits}))
    await asyncio.sleep(0.01)
    began = time.perf_counter()
    submitted = asyncio.create_task(probe.post("optim_step", step(run_id, number)))
    status, _ = await answer
    took = time.perf_counter() - began
    await submitted
    if status != 200:
        raise RuntimeError(f"a poll was answered with {status}")
    return took


async def held_polls(server: Server) -> int:
    """How many polls the server says it holds."""
    reader, writer = await asyncio.open_connection(server.host, server.port)
    writer.write(
        f"GET /metrics HTTP/1.1\r\nHost: x\r\nX-API-Key: {server.key}\r\nConnection: close\r\n\r\n".encode()
    )
    text = await reader.read()
    writer.close()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith(b"tinkex_polls "))


# ---- what is printed


def tell(name: str, figures: dict[str, float]) -> None:
    print(f"\n| {name} | measured | aim |\n| --- | --- | --- |")
    for figure, value in figures.items():
        aim = AIMS.get(figure)
        missed = " (not reached)" if aim is not None and value > aim else ""
        digits = 1 if value >= 10 else 3
        print(
            f"| {figure} | {value:,.{digits}f}{missed} | {f'≤ {aim:g}' if aim is not None else ''} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each number of clients")
    parser.add_argument("--polls", type=int, default=POLLS, help="how many polls are held")
    parser.add_argument("--rounds", type=int, default=3, help="of training on each side, two steps each")
    parser.add_argument(
        "--soak", type=float, metavar="SECONDS", help="a mixed load instead, and memory over time"
    )
    parser.add_argument("--only", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # the server inherits it
    found: dict[str, Any] = {}
    if options.soak:
        with served(*SHORT_LIVED) as server:
            found["soak"] = asyncio.run(soak(server, options.soak, lambda line: print(line, flush=True)))
        print(f"\ngrowth of memory, last third over the middle one: {found['soak']['growth']:.3f}")
    else:
        if "operations" in options.only:
            found |= measure_operations(options.seconds)
        if "polls" in options.only:
            with served("--long-poll-s", "44") as server:
                found["polls"] = asyncio.run(polls(server, options.polls))
            tell("polls", found["polls"])
        if "training" in options.only:
            found["training"] = asyncio.run(compare(options.rounds, 2))
            tell("training", found["training"])
    if options.json:
        options.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
