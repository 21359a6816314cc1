"""How long health checks take while one user sends the largest and most hostile bodies, and asks for the largest replies."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import numpy as np
import zstandard
from server_side import MODEL, Connection, Server, connected

from tinkex._wire.proto import CONTENT_TYPE as PROTO
from tinkex._wire.proto import encode_forward_backward
from tinkex.types import Datum, ForwardBackwardRequest, ModelInput, TensorData

ROUNDS = 5
READERS = 20
AIM_MS = 100.0
MIB = 1024 * 1024


def bodies(run_id: str) -> dict[str, tuple[str, bytes, str, str]]:
    """Endpoint, body, content type and content encoding of each case."""

    def training(data: list[Datum]) -> bytes:
        # Number 10 waits for those before it, so nothing is computed.
        return encode_forward_backward(
            ForwardBackwardRequest(model_id=run_id, seq_id=10, data=data, loss_fn="cross_entropy")
        )

    tokens = ",".join(str(10_000 + number % 50_000) for number in range(900_000))
    prompt = f'{{"prompt":{{"chunks":[{{"type":"encoded_text","tokens":[{tokens}]}}]}},"sampling_params":{{}},"base_model":"{MODEL}"}}'
    events = b'{"events":[' + b"{}," * (16 * MIB // 3) + b"{}]}"
    usual = Datum(ModelInput.from_ints([5] * 300), {"target_tokens": [6] * 300, "weights": [1.0] * 300})
    tensors = {
        name: TensorData.from_numpy(np.zeros(5 * MIB // 2, np.float32))
        for name in ("weights", "advantages", "x")
    }
    return {
        "16 MB of empty events in 2 KB": ("telemetry", zstandard.compress(events), "application/json", "zstd"),
        "a prompt of 900,000 tokens": ("asample", prompt.encode(), "application/json", ""),
        "a pass of 30 MB": ("forward_backward", training([Datum(ModelInput.from_ints([5]), tensors)]), PROTO, ""),
        "a pass of 8,000 empty datums": ("forward_backward", training([]) + b"\x1a\x00" * 8000, PROTO, ""),
        "a pass of 1,000 datums": ("forward_backward", training([usual] * 1000), PROTO, ""),
    }  # fmt: skip


async def health_during_bodies(server: Server) -> dict[str, float]:
    """Returns the longest health check during each case, in milliseconds."""
    found: dict[str, float] = {}
    async with connected(server, 2) as (sender, probe):
        run_id = await sender.run()
        found["health, idle, max ms"] = await _longest(probe, asyncio.create_task(asyncio.sleep(2.0)))
        for title, case in bodies(run_id).items():
            sending = asyncio.create_task(_send(sender, *case))
            found[f"health, {title}, max ms"] = await _longest(probe, sending)
        request_id = await _large_result(sender)
    async with connected(server, 1 + READERS) as (probe, *readers):
        polling = asyncio.gather(*(reader.result(request_id) for reader in readers))
        found[f"health, {READERS} polls for a large result as JSON, max ms"] = await _longest(probe, polling)
    return found


async def _large_result(connection: Connection) -> str:
    """The id of a pass of 150,000 tokens that has ended."""
    run_id = await connection.run()
    usual = Datum(ModelInput.from_ints([5] * 300), {"target_tokens": [6] * 300})
    request = ForwardBackwardRequest(model_id=run_id, seq_id=1, data=[usual] * 500, loss_fn="cross_entropy")
    status, content = await connection.send(
        "POST", "forward_backward", encode_forward_backward(request), PROTO
    )
    if status != 200:
        raise RuntimeError(f"a pass: {status} {content!r}")
    request_id: str = json.loads(content)["request_id"]
    await connection.result(request_id)
    return request_id


async def _send(connection: Connection, name: str, body: bytes, content_type: str, encoding: str) -> None:
    for _ in range(ROUNDS):
        status, content = await connection.send("POST", name, body, content_type, encoding)
        if status >= 500:
            raise RuntimeError(f"{name}: {status} {content!r}")


async def _longest(probe: Connection, during: asyncio.Future[Any]) -> float:
    longest = 0.0
    while not during.done():
        started = time.perf_counter()
        await probe.send("GET", "healthz", b"")
        longest = max(longest, time.perf_counter() - started)
        await asyncio.sleep(0.001)
    await during
    return longest * 1000
