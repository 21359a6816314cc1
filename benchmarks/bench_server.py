"""What the server itself costs: latency, throughput, held polls, and memory under a long mixed load.

    python benchmarks/bench_server.py [--seconds N] [--polls N] [--json FILE] [--only CASE ...]
    python benchmarks/bench_server.py --soak SECONDS [--json FILE]

A server with a tiny model runs in a process of its own on the loopback, with the journal on. The operation is an
optimizer step without a gradient: accepted, flushed to disk, run, recorded and fetched, with next to nothing to compute.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from tests.models import tiny_llama  # noqa: E402 -- the tests' model, found from the repository

CLIENTS = (1, 16, 256)
SECONDS, POLLS, PROBES = 5.0, 5000, 50
CASES = ("operations", "polls")
AIM_MB, AIM_MS = 300, 50
MODEL = "tiny/llama"
TOKENS = [5 + place % 200 for place in range(32)]


@dataclass(frozen=True)
class Server:
    host: str
    port: int
    key: str
    pid: int

    @property
    def resident_mb(self) -> float:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * resource.getpagesize() / 1e6


@contextmanager
def served(*arguments: str) -> Iterator[Server]:
    """`tinkex serve` on a free port, ended by SIGTERM."""
    with tempfile.TemporaryDirectory() as home:
        model = tiny_llama(Path(home) / "tiny")
        command = [
            sys.executable,
            "-m",
            "tinkex",
            "--json",
            "serve",
            "--port",
            "0",
            "--model",
            f"{MODEL}={model}",
        ]
        process = subprocess.Popen(
            [*command, "--max-live-runs", "1000", *arguments],
            stdout=subprocess.PIPE,
            env={**os.environ, "TINKEX_HOME": home},
        )
        assert process.stdout is not None
        try:
            told = json.loads(process.stdout.readline() or b"{}")
            host, port = told["url"].removeprefix("http://").split(":")
            yield Server(host, int(port), told["api_key"], process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
            process.stdout.close()


class Connection:
    """One kept-alive connection that speaks as much HTTP as is needed here."""

    def __init__(self, server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._head = f"Host: {server.host}\r\nX-API-Key: {server.key}\r\nContent-Type: application/json\r\n"
        self._reader, self._writer = reader, writer

    async def call(self, name: str, body: object, method: str = "POST") -> tuple[int, bytes]:
        content = json.dumps(body).encode() if method == "POST" else b""
        head = f"{method} /api/v1/{name} HTTP/1.1\r\n{self._head}Content-Length: {len(content)}\r\n\r\n"
        self._writer.write(head.encode() + content)
        answer = await self._reader.readuntil(b"\r\n\r\n")
        fields = dict(line.lower().split(": ", 1) for line in answer.decode("latin-1").split("\r\n")[1:-2])
        return int(answer[9:12]), await self._reader.readexactly(int(fields["content-length"]))

    async def post(self, name: str, body: object) -> dict[str, Any]:
        status, content = await self.call(name, body)
        if status != 200:
            raise RuntimeError(f"{name}: {status} {content!r}")
        found: dict[str, Any] = json.loads(content)
        return found

    async def result(self, request_id: str) -> None:
        while True:
            status, content = await self.call("retrieve_future", {"request_id": request_id})
            if status == 200:
                # Results of passes and samples are protobuf, or JSON for those who say nothing; errors always JSON.
                assert b'"error"' not in content[:200], content
                return
            assert status == 408, content

    async def finished(self, name: str, body: object) -> None:
        await self.result((await self.post(name, body))["request_id"])

    async def run(self) -> str:
        """A new training run of a new session."""
        session = (await self.post("create_session", {}))["session_id"]
        lora = {"rank": 1, "seed": 1, "train_mlp": False, "train_unembed": False}
        request = {"session_id": session, "model_seq_id": 0, "base_model": MODEL, "lora_config": lora}
        await self.finished("create_model", request)
        return f"{session}:train:0"

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()


@contextlib.asynccontextmanager
async def connected(server: Server, count: int) -> AsyncIterator[list[Connection]]:
    connections: list[Connection] = []
    try:
        for _ in range(0, count, 200):  # fewer at once than the server has in its backlog
            some = min(200, count - len(connections))
            opened = await asyncio.gather(
                *(asyncio.open_connection(server.host, server.port) for _ in range(some))
            )
            connections += [Connection(server, reader, writer) for reader, writer in opened]
        yield connections
    finally:
        await asyncio.gather(*(connection.close() for connection in connections))


def step(run_id: str, number: int) -> dict[str, Any]:
    return {"model_id": run_id, "seq_id": number, "adam_params": {"learning_rate": 1e-4}}


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

        began = time.perf_counter()
        await asyncio.gather(
            *(work(c, run, began + seconds) for c, run in zip(connections, runs, strict=True))
        )
        took = time.perf_counter() - began
    ordered = sorted(latencies)
    return {
        "operations/s": len(ordered) / took,
        "p50, ms": 1000 * ordered[len(ordered) // 2],
        "p99, ms": 1000 * ordered[int(len(ordered) * 0.99)],
    }


# ---- polls: futures that wait


async def polls(server: Server, count: int) -> dict[str, float]:
    before = server.resident_mb  # connections, operations and polls are all counted
    async with connected(server, count) as waiting, connected(server, 2) as (probe, poller):
        run_id, other = await probe.run(), await probe.run()
        ids = [(await probe.post("optim_step", step(run_id, 2 + n)))["request_id"] for n in range(count)]
        held = [
            asyncio.create_task(connection.call("retrieve_future", {"request_id": request_id}))
            for connection, request_id in zip(waiting, ids, strict=True)
        ]
        while f"tinkex_polls {count}".encode() not in await metrics(server):  # noqa: ASYNC110 -- it is another process
            await asyncio.sleep(0.1)
        with_polls = server.resident_mb
        delays = [await _wake(probe, poller, other, 2 * n + 1) for n in range(PROBES)]
        began = time.perf_counter()
        await probe.post("optim_step", step(run_id, 1))
        statuses = [status for status, _ in await asyncio.gather(*held)]
        took = time.perf_counter() - began
    assert statuses == [200] * count, "some polls ended before the result"
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
    assert status == 200
    return took


async def metrics(server: Server) -> bytes:
    reader, writer = await asyncio.open_connection(server.host, server.port)
    writer.write(
        f"GET /metrics HTTP/1.1\r\nHost: x\r\nX-API-Key: {server.key}\r\nConnection: close\r\n\r\n".encode()
    )
    text = await reader.read()
    writer.close()
    return text


# ---- soak: everything at once, for long


async def soak(server: Server, seconds: float, told: Callable[[str], None]) -> dict[str, Any]:
    until = time.perf_counter() + seconds
    done = dict.fromkeys(("trained", "sampled", "saved", "refused", "dropped"), 0)

    async def train(connection: Connection) -> None:
        tensor = {"data": TOKENS[1:], "dtype": "int64", "shape": [len(TOKENS) - 1]}
        chunk = {"type": "encoded_text", "tokens": TOKENS[:-1]}
        datum = {"model_input": {"chunks": [chunk]}, "loss_fn_inputs": {"target_tokens": tensor}}
        given = {"data": [datum] * 4, "loss_fn": "cross_entropy"}
        while time.perf_counter() < until:
            run_id = await connection.run()
            for number in range(1, 40, 3):
                body = {"model_id": run_id, "seq_id": number, "forward_backward_input": given}
                await connection.finished("forward_backward", body)
                await connection.finished("optim_step", step(run_id, number + 1))
                save = {"model_id": run_id, "seq_id": number + 2, "path": f"s{number}", "ttl_seconds": 1}
                await connection.finished("save_weights", save)
                done["trained"] += 1
                done["saved"] += 1
            await connection.finished("unload_model", {"model_id": run_id})

    async def sample(connection: Connection) -> None:
        session = (await connection.post("create_session", {}))["session_id"]
        made = {"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL}
        sampler = (await connection.post("create_sampling_session", made))["sampling_session_id"]
        for number in itertools.count(1):
            if time.perf_counter() >= until:
                return
            prompt = {"chunks": [{"type": "encoded_text", "tokens": [5 + number % 300, *TOKENS]}]}
            params = {"max_tokens": 8, "stop": [], "seed": number}
            body = {
                "sampling_session_id": sampler,
                "seq_id": number,
                "prompt": prompt,
                "sampling_params": params,
            }
            await connection.finished("asample", body)
            done["sampled"] += 1

    async def annoy(connection: Connection) -> None:
        while time.perf_counter() < until:
            for name in ("asample", "forward_backward", "create_model", "nowhere"):
                status, _ = await connection.call(name, {"junk": "x" * 1000})
                assert 400 <= status < 500
                done["refused"] += 1
            async with connected(server, 5) as leaving:  # polls whose callers hang up
                for each in leaving:
                    each._writer.write(b"POST /api/v1/create_session HTTP/1.1\r\nContent-Length: 99\r\n\r\n{")
                done["dropped"] += 5
            await asyncio.sleep(0.05)

    async def watch() -> list[tuple[float, float]]:
        began, seen = time.perf_counter(), []
        every = max(seconds / 20, 0.5)
        while time.perf_counter() < until:
            await asyncio.sleep(every)
            seen.append((time.perf_counter() - began, server.resident_mb))
            counts = " | ".join(f"{count:,}" for count in done.values())
            told(f"| {seen[-1][0]:,.0f} | {seen[-1][1]:,.1f} | {counts} |")
        return seen

    told(f"| s | memory, MB | {' | '.join(done)} |\n| --- | --- |{' --- |' * len(done)}")
    async with connected(server, 5) as (one, two, three, four, five):
        *_, seen = await asyncio.gather(
            train(one), train(two), sample(three), sample(four), annoy(five), watch()
        )
    return {"memory": seen, "growth": growth([mb for _, mb in seen]), **done}


def growth(memory: Sequence[float]) -> float:
    """The last quarter's median over the second quarter's: what is left to grow once everything is warm."""
    quarter = max(len(memory) // 4, 1)
    return statistics.median(memory[-quarter:]) / statistics.median(memory[quarter : 2 * quarter])


# ---- what is printed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each number of clients")
    parser.add_argument("--polls", type=int, default=POLLS, help="how many polls are held")
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
        short = ("--fetched-retention-s", "2", "--result-retention-s", "4", "--maintenance-interval-s", "1")
        with served(*short) as server:
            found["soak"] = asyncio.run(soak(server, options.soak, lambda line: print(line, flush=True)))
        print(f"\ngrowth of memory, last quarter over second: {found['soak']['growth']:.3f}")
    if not options.soak and "operations" in options.only:
        print("| clients | operations/s | p50, ms | p99, ms |\n| --- | --- | --- | --- |", flush=True)
        for clients in CLIENTS:
            with served() as server:
                figures = asyncio.run(operations(server, clients, options.seconds))
            found[f"{clients} clients"] = figures
            print(
                f"| {clients} | {' | '.join(f'{figure:,.1f}' for figure in figures.values())} |", flush=True
            )
    if not options.soak and "polls" in options.only:
        with served("--long-poll-s", "44") as server:
            figures = found["polls"] = asyncio.run(polls(server, options.polls))
        print("\n| polls | measured | aim |\n| --- | --- | --- |")
        aims = {"memory, MB": f"< {AIM_MB}", "wake max, ms": f"< {AIM_MS}"}
        for name, figure in figures.items():
            print(f"| {name} | {figure:,.1f} | {aims.get(name, '')} |")
        for name, aim in (("memory, MB", AIM_MB), ("wake max, ms", AIM_MS)):
            if figures[name] >= aim:
                print(f"not reached: {name}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
