"""Helpers of the server benchmarks: server processes, and minimal HTTP connections."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from tests.models import tiny_llama  # noqa: E402 -- the tests' model, imported from the repository

MODEL = "tiny/llama"


@dataclass(frozen=True)
class Server:
    host: str
    port: int
    key: str
    pid: int

    def processes(self) -> list[psutil.Process]:
        """Returns the server process and its worker process, if any."""
        server = psutil.Process(self.pid)
        return [server, *server.children()]

    def resident_mb(self) -> list[float]:
        return [process.memory_info().rss / 1e6 for process in self.processes()]

    def cpu_s(self) -> list[float]:
        return [sum(process.cpu_times()[:2]) for process in self.processes()]


@contextmanager
def served(*arguments: str, idle: bool = False, model: str = "") -> Iterator[Server]:
    """Runs `tinkex serve` with a tiny model on a free port, or with ``idle`` a server that computes nothing."""
    with tempfile.TemporaryDirectory() as home:
        source = model or f"{MODEL}={tiny_llama(Path(home) / 'tiny')}"
        command = [sys.executable, "-m", "tinkex", "--json", "serve", "--port", "0", "--model", source]
        command += ["--max-live-runs", "1000", *arguments]
        if idle:
            command = [sys.executable, str(Path(__file__).with_name("idle_server.py")), home]
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
        if not model:
            environment["TINKEX_HOME"] = home
        else:
            environment["TINKEX_DATA_DIR"] = home + "/data"
        process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
        assert process.stdout is not None
        try:
            ready = json.loads(process.stdout.readline() or b"{}")
            host, port = ready["url"].removeprefix("http://").split(":")
            yield Server(host, int(port), ready["api_key"], process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
            process.stdout.close()


class Connection:
    """One keep-alive connection."""

    def __init__(self, server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._head = f"Host: {server.host}\r\nX-API-Key: {server.key}\r\n"
        self._reader, self.writer = reader, writer

    async def call(self, name: str, body: object, method: str = "POST") -> tuple[int, bytes]:
        return await self.send(method, name, json.dumps(body).encode() if method == "POST" else b"")

    async def send(
        self,
        method: str,
        name: str,
        content: bytes,
        content_type: str = "application/json",
        encoding: str = "identity",
    ) -> tuple[int, bytes]:
        path = name if name.startswith("/") else f"/api/v1/{name}"
        head = (
            f"{method} {path} HTTP/1.1\r\n{self._head}Content-Type: {content_type}\r\n"
            f"Content-Encoding: {encoding or 'identity'}\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        self.writer.write(head.encode() + content)
        response = await self._reader.readuntil(b"\r\n\r\n")
        fields = dict(line.lower().split(": ", 1) for line in response.decode("latin-1").split("\r\n")[1:-2])
        return int(response[9:12]), await self._reader.readexactly(int(fields["content-length"]))

    async def post(self, name: str, body: object) -> dict[str, Any]:
        status, content = await self.call(name, body)
        if status != 200:
            raise RuntimeError(f"{name}: {status} {content!r}")
        found: dict[str, Any] = json.loads(content)
        return found

    async def stream(self, name: str, body: object) -> bytes:
        """Sends a request whose answer is a stream of events, and returns all of them."""
        content = json.dumps(body).encode()
        path = name if name.startswith("/") else f"/api/v1/{name}"
        head = f"POST {path} HTTP/1.1\r\n{self._head}Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        self.writer.write(head.encode() + content)
        response = await self._reader.readuntil(b"\r\n\r\n")
        if b"text/event-stream" not in response:
            raise RuntimeError(f"{name}: {response!r}")
        events = bytearray()
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            events += (await self._reader.readexactly(size + 2))[:-2]
        await self._reader.readexactly(2)
        return bytes(events)

    async def result(self, request_id: str) -> None:
        while True:
            status, content = await self.call("retrieve_future", {"request_id": request_id})
            if status == 200:
                # Results of passes and samples are protobuf or JSON; errors are always JSON.
                if b'"error"' in content[:200]:
                    raise RuntimeError(content)
                return
            if status != 408:
                raise RuntimeError(f"a poll: {status} {content!r}")

    async def finished(self, name: str, body: object) -> None:
        await self.result((await self.post(name, body))["request_id"])

    async def run(self, base_model: str = MODEL, **lora: Any) -> str:
        """Creates a training run in a new session."""
        session = (await self.post("create_session", {}))["session_id"]
        config = lora or {"rank": 1, "seed": 1, "train_mlp": False, "train_unembed": False}
        request = {"session_id": session, "model_seq_id": 0, "base_model": base_model, "lora_config": config}
        await self.finished("create_model", request)
        return f"{session}:train:0"

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


@contextlib.asynccontextmanager
async def connected(server: Server, count: int) -> AsyncIterator[list[Connection]]:
    connections: list[Connection] = []
    try:
        for _ in range(0, count, 200):  # less than the server's backlog
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


def forward_backward(run_id: str, number: int, tokens: list[int], count: int) -> dict[str, Any]:
    tensor = {"data": tokens[1:], "dtype": "int64", "shape": [len(tokens) - 1]}
    chunk = {"type": "encoded_text", "tokens": tokens[:-1]}
    datum = {"model_input": {"chunks": [chunk]}, "loss_fn_inputs": {"target_tokens": tensor}}
    inputs = {"data": [datum] * count, "loss_fn": "cross_entropy"}
    return {"model_id": run_id, "seq_id": number, "forward_backward_input": inputs}
