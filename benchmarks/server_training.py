"""Compares training steps through the server with the same steps of the bare engine, on the default model.

python benchmarks/server_training.py --bare     the bare engine; runs as many steps as each line of stdin says
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from server_side import connected, forward_backward, served, step  # noqa: E402

LORA = {"rank": 32, "seed": 1}
TOKENS = [100 + 7 * index % 4000 for index in range(129)]
DATUMS = 8


async def compare(rounds: int, steps: int) -> dict[str, float]:
    """Measures CPU time and wall time of alternating rounds of a few steps on both sides."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    bare = subprocess.Popen(  # noqa: ASYNC220 -- no other task runs here
        [sys.executable, __file__, "--bare"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    )
    assert bare.stdin is not None
    assert bare.stdout is not None
    name = json.loads(bare.stdout.readline())["model"]
    times: dict[str, list[tuple[float, float]]] = {"bare": [], "served": []}
    try:
        with served(model=name) as server:
            async with connected(server, 1) as [connection]:
                run_id, number = await connection.run(name, **LORA), 1
            for round_number in range(rounds + 1):
                bare.stdin.write(b"%d\n" % steps)
                bare.stdin.flush()
                bare_times = json.loads(await asyncio.to_thread(bare.stdout.readline))
                async with connected(server, 1) as [connection]:
                    clock, cpu = time.perf_counter(), sum(server.cpu_s())
                    for _ in range(steps):
                        # Submit both before waiting for the first result, as training loops do.
                        passed = await connection.post(
                            "forward_backward", forward_backward(run_id, number, TOKENS, DATUMS)
                        )
                        stepped = await connection.post("optim_step", step(run_id, number + 1))
                        await connection.result(passed["request_id"])
                        await connection.result(stepped["request_id"])
                        number += 2
                    elapsed = (time.perf_counter() - clock, sum(server.cpu_s()) - cpu)
                if round_number:  # the first round is a warm-up
                    times["bare"].append((bare_times["clock"], bare_times["cpu"]))
                    times["served"].append(elapsed)
    finally:
        bare.stdin.close()
        bare.wait(60)
        bare.stdout.close()
    best: dict[str, Any] = {
        side: [min(each) / steps for each in zip(*all_, strict=True)] for side, all_ in times.items()
    }
    return {
        "bare, s/step": best["bare"][0],
        "served, s/step": best["served"][0],
        "bare, CPU s/step": best["bare"][1],
        "served, CPU s/step": best["served"][1],
        "time, served : bare": best["served"][0] / best["bare"][0],
        "CPU, served : bare": best["served"][1] / best["bare"][1],
    }


def bare() -> None:
    """Runs as many steps as each line of stdin says, and prints their duration."""
    from tinkex.engine.config import EngineConfig
    from tinkex.engine.lanes.in_process import LocalBackend
    from tinkex.engine.lanes.interface import PassJob
    from tinkex.engine.model.catalog import DEFAULT_MODEL
    from tinkex.engine.trainer.examples import read_pass
    from tinkex.types import AdamParams, Datum, LoraConfig, ModelInput

    with tempfile.TemporaryDirectory() as data:
        backend = LocalBackend(EngineConfig(data_dir=Path(data)))
        info = backend.load(DEFAULT_MODEL)
        backend.create("run", DEFAULT_MODEL, LoraConfig(rank=LORA["rank"], seed=LORA["seed"]))
        datum = Datum(ModelInput.from_ints(TOKENS[:-1]), {"target_tokens": TOKENS[1:]})
        _, examples = read_pass([datum] * DATUMS, "cross_entropy", None, info.passes)
        job = PassJob("run", "cross_entropy", examples, backward=True)
        print(json.dumps({"model": DEFAULT_MODEL}), flush=True)
        for line in sys.stdin:
            clock, cpu = time.perf_counter(), time.process_time()
            for _ in range(int(line)):
                results = backend.run_pass([job], share_prefixes=True)
                assert results is not None, "a built-in loss is not suspended"
                [result] = results
                assert isinstance(result.output, bytes), result.output
                backend.optim_step("run", AdamParams(learning_rate=1e-4))
            elapsed = {"clock": time.perf_counter() - clock, "cpu": time.process_time() - cpu}
            print(json.dumps(elapsed), flush=True)


if __name__ == "__main__" and "--bare" in sys.argv:
    bare()
