"""Passes that several trainers compute, while trainers and the server are killed: the results are those of one trainer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import tinkex
from tests.durability.killable import MODEL, KillableServer
from tinkex import types

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 6
LAYOUT = ("--threads", "1", "--data-parallel-tokens", "300")


def batch(seed: int) -> list[types.Datum]:
    """Groups of answers to a prompt, of about 2,500 distinct tokens."""
    random = np.random.default_rng(seed)
    data = []
    for _ in range(10):
        prompt = random.integers(5, 200, 30).tolist()
        for _ in range(6):
            tokens = [*prompt, *random.integers(5, 200, 36).tolist()]
            data.append(types.Datum(types.ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]}))
    return data


def program(server: KillableServer, disturb: Callable[[int], None]) -> tuple[list[bytes], bytes]:
    """Trains with all operations in flight; returns every result, and the saved weights and moments."""
    with tinkex.ServiceClient(base_url=server.url, api_key=server.key) as service:
        training = service.create_lora_training_client(MODEL, rank=4, seed=7)
        passes, steps = [], []
        for n in range(STEPS):
            passes.append(training.forward_backward(batch(n), "cross_entropy"))
            steps.append(training.optim_step(types.AdamParams(learning_rate=1e-2)))
        for n, each in enumerate(passes):
            disturb(n)
            each.result(timeout=180)
        assert [step.result(timeout=180).metrics["step:unique"] for step in steps] == list(
            range(1, STEPS + 1)
        )  # type: ignore[index]  # a step has metrics
        path = training.save_state("end").result(timeout=180).path
        directory = (
            server.home / "engine" / "checkpoints" / training.model_id.replace(":", "~") / "weights" / "end"
        )
        assert path == f"tinker://{training.model_id}/weights/end"
        tensors = {
            **load_file(directory / "adapter_model.safetensors"),
            **load_file(directory / "optimizer.safetensors"),
        }
        found = []
        for each in passes:
            output = each.result()
            found.append(repr(sorted(output.metrics.items())).encode())
            found += [one["logprobs"].to_numpy().tobytes() for one in output.loss_fn_outputs]
        return found, b"".join(tensors[name].tobytes() for name in sorted(tensors))


@pytest.fixture(scope="module")
def expected(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[bytes], bytes]:
    """What one trainer gives, shard by shard."""
    with KillableServer(tmp_path_factory.mktemp("one"), tiny_model, *LAYOUT) as server:
        return program(server, lambda _: None)


@pytest.mark.parametrize("victim", ["nobody", "home", "helper", "server", "in turns"])
def test_the_results_are_those_of_one_trainer_in_the_same_layout(
    tiny_model: Path, tmp_path: Path, expected: tuple[list[bytes], bytes], victim: str
) -> None:
    with KillableServer(tmp_path, tiny_model, *LAYOUT, "--trainers", "2", often=4) as server:

        def kill(who: str) -> None:
            if who == "server":
                server.restart()
            elif workers := sorted(server.workers(), key=lambda worker: worker.create_time()):
                workers[0 if who == "home" else -1].kill()

        def disturb(n: int) -> None:
            order = {"in turns": ["helper", "home", "server", "helper", "home", "helper"]}
            who = order.get(victim, [victim] * STEPS)[n]
            if who != "nobody" and (victim == "in turns" or n % 3 == 1):
                timer = threading.Timer(
                    0.05 * n, kill, [who]
                )  # while the pass runs, at different moments of it
                timer.start()
                timer.join()

        assert program(server, disturb) == expected
        server.wait()
        assert "other digits" not in server.log
        assert "Traceback" not in server.log
