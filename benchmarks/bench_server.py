"""Benchmarks the server: latency, throughput, long polls, training through it, and memory under a mixed load.

    python benchmarks/bench_server.py [--seconds N] [--polls N] [--json FILE] [--only CASE ...]
    python benchmarks/bench_server.py --soak SECONDS [--json FILE]

operations  a server process with a tiny model and its journal, over loopback. The operation is an optimizer step without
            a gradient: accepted, flushed to disk, run, committed and fetched, with minimal computation; then the same
            with an engine that computes nothing, which leaves the cost of the server alone.
polls       thousands of long polls for missing results: their memory, and the wake-up latency.
bodies      the longest health check while one user sends the largest and most hostile bodies, and polls for large results.
training    steps through the server compared with the same steps of the bare engine, on the default model.
metrics     recording the metrics of a step compared with the step, on the default model.
streams     what ten connected pages of the dashboard cost while a run trains, on the default model.
lanes       two samplers compared with one, and a trainer and a sampler side by side with each alone, a thread each.
shards      passes that two trainers compute together compared with the same on one, a thread each, on the default model.
routes      completions and chats of the OpenAI protocol compared with the same native samples and streams.

CPU times are those of the server's processes and do not depend on other load; the other measurements do.
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

from server_bodies import AIM_MS, health_during_bodies  # noqa: E402
from server_lanes import measure_lanes  # noqa: E402
from server_metrics import measure_metrics  # noqa: E402
from server_routes import compare_routes  # noqa: E402
from server_shards import measure_shards  # noqa: E402
from server_side import Connection, Server, connected, served, step  # noqa: E402
from server_soak import SHORT_LIVED, soak  # noqa: E402
from server_streams import measure_streams  # noqa: E402
from server_training import compare  # noqa: E402

CLIENTS = (1, 4, 16, 64)
SECONDS, POLLS, PROBES = 5.0, 5000, 50
CASES = ("operations", "polls", "bodies", "training", "metrics", "streams", "lanes", "shards", "routes")
ROUTE_AIM = 1.1
AIMS = {
    "memory, MB": 300.0,
    "wake max, ms": 50.0,
    "time, served : bare": 1.05,
    "CPU, served : bare": 1.05,
    "CPU, recording : step": 0.01,
    "CPU, streams : step": 0.02,
    "time, shards : whole": 0.6,
    "CPU, shards : whole": 1.1,
}
"""Upper limits of measurements."""
SPEED_AIMS = {
    "speed, two samplers : one": 1.7,
    "speed, trainer beside a sampler : alone": 0.9,
    "speed, sampler beside a trainer : alone": 0.9,
}
"""Lower limits."""


# ---- operations: submit → result


async def operations(server: Server, clients: int, seconds: float) -> dict[str, float]:
    async with connected(server, clients) as connections:
        runs = await asyncio.gather(*(connection.run() for connection in connections))
        latencies: list[float] = []

        async def work(connection: Connection, run_id: str, until: float) -> None:
            for number in itertools.count(1):
                start = time.perf_counter()
                if start >= until:
                    return
                await connection.finished("optim_step", step(run_id, number))
                latencies.append(time.perf_counter() - start)

        start, cpu = time.perf_counter(), server.cpu_s()
        await asyncio.gather(
            *(work(c, run, start + seconds) for c, run in zip(connections, runs, strict=True))
        )
        elapsed = time.perf_counter() - start
        used = [after - before for after, before in zip(server.cpu_s(), cpu, strict=True)]
    ordered = sorted(latencies)
    return {
        "operations/s": len(ordered) / elapsed,
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
                measurements = asyncio.run(operations(server, clients, seconds))
            engine = "nothing" if idle else "tiny model"
            if not found:
                print(
                    f"| engine | clients | {' | '.join(measurements)} |\n| --- | --- |{' --- |' * len(measurements)}"
                )
            found[f"{engine}, {clients} clients"] = measurements
            cells = " | ".join(f"{value:,.1f}" for value in measurements.values())
            print(f"| {engine} | {clients} | {cells} |", flush=True)
    return found


# ---- long polls


async def polls(server: Server, count: int) -> dict[str, float]:
    before = sum(server.resident_mb())  # includes connections, operations and polls
    async with connected(server, count) as waiting, connected(server, 2) as (probe, poller):
        run_id, other = await probe.run(), await probe.run()
        ids = [(await probe.post("optim_step", step(run_id, 2 + n)))["request_id"] for n in range(count)]
        held = [
            asyncio.create_task(connection.result(request_id))  # polls again after a timeout
            for connection, request_id in zip(waiting, ids, strict=True)
        ]
        while await open_polls(server) < count:  # noqa: ASYNC110 -- the server is another process
            await asyncio.sleep(0.1)
        with_polls = sum(server.resident_mb())
        delays = [await _wake(probe, poller, other, 2 * n + 1) for n in range(PROBES)]
        start = time.perf_counter()
        await probe.post("optim_step", step(run_id, 1))
        await asyncio.gather(*held)
        elapsed = time.perf_counter() - start
    ordered = sorted(delays)
    return {
        "held": float(count),
        "memory, MB": with_polls - before,
        "memory of the server, MB": with_polls,
        "wake p50, ms": 1000 * ordered[len(ordered) // 2],
        "wake max, ms": 1000 * ordered[-1],
        "all delivered, s": elapsed,
    }


async def _wake(probe: Connection, poller: Connection, run_id: str, number: int) -> float:
    """Measures the delay between a result and the response to its long poll.

    The poll waits for an operation whose predecessor is missing. The time starts when the predecessor is sent, so it
    includes both operations and is an upper bound of the delay.
    """
    blocked = (await probe.post("optim_step", step(run_id, number + 1)))["request_id"]
    answer = asyncio.create_task(poller.call("retrieve_future", {"request_id": blocked}))
    await asyncio.sleep(0.01)
    start = time.perf_counter()
    submitted = asyncio.create_task(probe.post("optim_step", step(run_id, number)))
    status, _ = await answer
    elapsed = time.perf_counter() - start
    await submitted
    if status != 200:
        raise RuntimeError(f"a poll was answered with {status}")
    return elapsed


async def open_polls(server: Server) -> int:
    """Returns the server's number of open long polls."""
    reader, writer = await asyncio.open_connection(server.host, server.port)
    writer.write(
        f"GET /metrics HTTP/1.1\r\nHost: x\r\nX-API-Key: {server.key}\r\nConnection: close\r\n\r\n".encode()
    )
    text = await reader.read()
    writer.close()
    return next(
        int(float(line.split()[1])) for line in text.splitlines() if line.startswith(b"tinkex_polls ")
    )


# ---- output


def print_table(title: str, measurements: dict[str, float]) -> None:
    print(f"\n| {title} | measured | aim |\n| --- | --- | --- |")
    for name, value in measurements.items():
        aim = AIM_MS if name.startswith("health, ") else AIMS.get(name)
        aim = ROUTE_AIM if name.endswith(" : native") else aim
        least = SPEED_AIMS.get(name)
        is_missed = (aim is not None and value > aim) or (least is not None and value < least)
        digits = 1 if value >= 10 else 3 if value >= 0.01 else 5
        wanted = f"≤ {aim:g}" if aim is not None else f"≥ {least:g}" if least is not None else ""
        print(f"| {name} | {value:,.{digits}f}{' (not met)' if is_missed else ''} | {wanted} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, help="duration per number of clients")
    parser.add_argument("--polls", type=int, default=POLLS, help="number of long polls")
    parser.add_argument("--rounds", type=int, default=3, help="training rounds per side, two steps each")
    parser.add_argument(
        "--soak", type=float, metavar="SECONDS", help="run a mixed load instead and print memory over time"
    )
    parser.add_argument("--only", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))  # the server inherits it
    found: dict[str, Any] = {}
    if options.soak:
        with served(*SHORT_LIVED) as server:
            found["soak"] = asyncio.run(soak(server, options.soak, lambda line: print(line, flush=True)))
        print(f"\nmemory growth, last third over middle third: {found['soak']['growth']:.3f}")
    else:
        if "operations" in options.only:
            found |= measure_operations(options.seconds)
        if "polls" in options.only:
            with served("--long-poll-s", "44") as server:
                found["polls"] = asyncio.run(polls(server, options.polls))
            print_table("polls", found["polls"])
        if "bodies" in options.only:
            with served() as server:
                found["bodies"] = asyncio.run(health_during_bodies(server))
            print_table("bodies", found["bodies"])
        if "training" in options.only:
            found["training"] = asyncio.run(compare(options.rounds, 2))
            print_table("training", found["training"])
        if "metrics" in options.only:
            found["metrics"] = measure_metrics(options.rounds)
            print_table("metrics", found["metrics"])
        if "streams" in options.only:
            found["streams"] = asyncio.run(measure_streams(options.rounds, 2))
            print_table("streams", found["streams"])
        if "lanes" in options.only:
            found["lanes"] = measure_lanes(options.rounds)
            print_table("lanes", found["lanes"])
        if "shards" in options.only:
            found["shards"] = asyncio.run(measure_shards(options.rounds))
            print_table("shards", found["shards"])
        if "routes" in options.only:
            found["routes"] = compare_routes(options.rounds)
            print_table("routes", found["routes"])
    if options.json:
        options.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
