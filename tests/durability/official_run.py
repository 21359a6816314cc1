"""A program with the official client that trains and samples, on a server that somebody may disturb."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from typing import Any

from tests.durability.killable import MODEL, KillableServer
from tests.official_process import official_command

__all__ = ["EVENTS", "run_official"]

ROUNDS = 4
EVENTS = 3 * ROUNDS
"""How often the program says that something of its is in flight."""
PROGRAM = f"""
import json, sys
import tinker
from tinker import types

service = tinker.ServiceClient()
training = service.create_lora_training_client(base_model={MODEL!r}, rank=4, seed=7)

def datum(seed):
    tokens = [(seed * 31 + 7 * j) % 190 + 5 for j in range(17)]
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs={{"target_tokens": tokens[1:]}})

found = []
for n in range({ROUNDS}):
    passed = [training.forward_backward([datum(n + k) for k in range(3)], "cross_entropy") for _ in range(2)]
    print("trains", flush=True)
    stepped = training.optim_step(types.AdamParams(learning_rate=1e-2))
    losses = [each.result() for each in passed]
    found.append([[each.metrics["loss:sum"], *(o["logprobs"].data for o in each.loss_fn_outputs)] for each in losses])
    print("saves", flush=True)
    sampler = training.save_weights_and_get_sampling_client(name=f"sampler-{{n}}")
    params = types.SamplingParams(max_tokens=40, seed=n, temperature=1.0)
    prompts = [types.ModelInput.from_ints([5 + k, 6, 7]) for k in range(6)]
    futures = [sampler.sample(prompt=prompt, num_samples=2, sampling_params=params) for prompt in prompts]
    print("samples", flush=True)
    for future in futures:
        found.append([[list(s.tokens), list(s.logprobs)] for s in future.result().sequences])
    found.append(stepped.result().metrics["step:unique"])
print(json.dumps(found))
"""


def run_official(server: KillableServer, disturb: Callable[[int], None] = lambda _: None) -> Any:
    """Runs it, and calls ``disturb`` with the number of each event; returns all losses, logprobs and tokens."""
    environment = {
        **os.environ,
        "TINKER_BASE_URL": server.url,
        "TINKER_API_KEY": server.key,
        "PYTHONWARNINGS": "ignore",
    }
    process = subprocess.Popen(
        official_command("-c", PROGRAM), stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    lines: list[str] = []
    try:
        with process.stdout:
            for line in process.stdout:
                lines.append(line)
                if len(lines) <= EVENTS:
                    disturb(len(lines) - 1)
        assert process.wait(60) == 0, server.log
    finally:
        process.kill()
        process.wait()
    assert len(lines) == EVENTS + 1
    return json.loads(lines[-1])
