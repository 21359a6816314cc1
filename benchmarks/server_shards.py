"""Compares passes that two trainers compute together with the same passes on one of them, on the default model.

Both servers have two trainers with a thread each; one of them cuts no passes.
"""

from __future__ import annotations

import os
import random
import time
from contextlib import ExitStack
from typing import Any

from server_side import Server, connected, forward_backward, served, step

LORA = {"rank": 32, "seed": 1}
DATUMS, LENGTH = 32, 96
SHARD_TOKENS = DATUMS * LENGTH // 4


def body(run_id: str, number: int) -> dict[str, Any]:
    """A pass over datums that share nothing."""
    rng = random.Random(number)
    requests = [
        forward_backward(run_id, number, [rng.randrange(100, 40_000) for _ in range(LENGTH + 1)], 1)
        for _ in range(DATUMS)
    ]
    data = [request["forward_backward_input"]["data"][0] for request in requests]
    return {**requests[0], "forward_backward_input": {"data": data, "loss_fn": "cross_entropy"}}


async def measure_shards(rounds: int) -> dict[str, float]:
    """Measures alternating passes, and what one costs; the load of the machine is part of the result."""
    from tinkex.engine.model.catalog import DEFAULT_MODEL

    times: dict[str, list[tuple[float, float]]] = {"whole": [], "in shards": []}
    with ExitStack() as stack:
        sides: dict[str, tuple[Server, str]] = {}
        for side, tokens in {"whole": 0, "in shards": SHARD_TOKENS}.items():
            options = ("--trainers", "2", "--threads", "1", "--data-parallel-tokens", str(tokens))
            server = stack.enter_context(served(*options, model=DEFAULT_MODEL))
            async with connected(server, 1) as [connection]:
                sides[side] = server, await connection.run(DEFAULT_MODEL, **LORA)
        for round_number in range(rounds + 1):
            for side, (server, run_id) in sides.items():
                number = 2 * round_number + 1
                async with connected(server, 1) as [connection]:
                    clock, cpu = time.perf_counter(), sum(server.cpu_s())
                    passed = await connection.post("forward_backward", body(run_id, number))
                    await connection.result(passed["request_id"])
                    elapsed = time.perf_counter() - clock, sum(server.cpu_s()) - cpu
                    stepped = await connection.post("optim_step", step(run_id, number + 1))
                    await connection.result(stepped["request_id"])
                if round_number:  # the first round is a warm-up
                    times[side].append(elapsed)
    best = {side: [min(each) for each in zip(*all_, strict=True)] for side, all_ in times.items()}
    return {
        **{f"{side}, s": seconds for side, (seconds, _) in best.items()},
        **{f"{side}, CPU s": cpu for side, (_, cpu) in best.items()},
        "time, shards : whole": best["in shards"][0] / best["whole"][0],
        "CPU, shards : whole": best["in shards"][1] / best["whole"][1],
        "load of the machine": os.getloadavg()[0],
    }
