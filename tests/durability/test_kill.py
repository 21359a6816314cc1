"""A client works while its server is killed: it sees a delay, and the results are those of an undisturbed run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import tinkex
from tests.durability.killable import MODEL, KillableServer
from tests.official_process import official_command
from tinkex import types

pytestmark = pytest.mark.slow

STEPS = 12


def datum(seed: int, length: int = 16) -> types.Datum:
    tokens = np.random.default_rng(seed).integers(5, 200, length + 1).tolist()
    return types.Datum(types.ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})


def program(server: KillableServer, disturb: Callable[[int], None]) -> tuple[list[bytes], bytes]:
    """Trains with all operations in flight; returns every result, and the saved weights and moments."""
    with tinkex.ServiceClient(base_url=server.url, api_key=server.key) as service:
        training = service.create_lora_training_client(MODEL, rank=4, seed=7)
        passes, steps = [], []
        for n in range(STEPS):
            passes.append(training.forward_backward([datum(n), datum(n + 100)], "cross_entropy"))
            steps.append(training.optim_step(types.AdamParams(learning_rate=1e-2)))
            if n == STEPS // 2:
                half = training.save_state("half")
            disturb(n)
        saved = training.save_state("end")
        logged = training.log_metrics(STEPS, {"finished": 1.0})
        sampler = training.save_weights_for_sampler("sampler")
        last = training.forward([datum(999)], "cross_entropy")
        outputs = [future.result(timeout=90) for future in [*passes, last]]
        metrics = [future.result(timeout=90).metrics for future in steps]
        assert [metric["step:unique"] for metric in metrics if metric] == list(range(1, STEPS + 1))
        assert half.result(timeout=90).path.endswith("weights/half")
        assert sampler.result(timeout=90).path.endswith("sampler_weights/sampler")
        directory = server.home / "engine" / "checkpoints" / training.model_id.replace(":", "~")
        assert saved.result(timeout=90).path == f"tinker://{training.model_id}/weights/end"
        tensors = {
            **load_file(directory / "weights" / "end" / "adapter_model.safetensors"),
            **load_file(directory / "weights" / "end" / "optimizer.safetensors"),
        }
        logged.result(timeout=90)
        check_recorded_metrics(
            server, training.model_id, [output.metrics["loss:sum"] for output in outputs[:-1]]
        )
        logprobs = [bytes(o.loss_fn_outputs[0]["logprobs"].to_numpy().tobytes()) for o in outputs]
        numbers = json.dumps([metrics, [o.metrics for o in outputs]], sort_keys=True).encode()
        return [*logprobs, numbers], b"".join(tensors[name].tobytes() for name in sorted(tensors))


def check_recorded_metrics(server: KillableServer, run_id: str, losses: list[float]) -> None:
    """Every step is recorded once, with its own passes, whenever the server was killed."""
    rest = tinkex.RestClient(base_url=server.url, api_key=server.key)
    metrics = rest.get_training_run_metrics(run_id).result(timeout=90)
    assert metrics.num_steps == STEPS
    assert metrics["loss:sum"].steps == list(range(1, STEPS + 1))
    assert metrics["loss:sum"].values == pytest.approx(losses)
    assert metrics["num_tokens:sum"].values == [32] * STEPS
    assert metrics["finished"].steps == [STEPS]


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KillableServer]:
    with KillableServer(tmp_path_factory.mktemp("killed"), tiny_model) as running:
        yield running


def test_a_client_sees_a_delay_and_the_same_results(server: KillableServer) -> None:
    expected = program(server, lambda _: None)

    def kill_now_and_then(n: int) -> None:
        if n in {2, 7}:
            server.restart()

    assert program(server, kill_now_and_then) == expected
    server.wait()
    assert "other digits" not in server.log


def test_a_sample_in_flight_is_sampled_again(server: KillableServer) -> None:
    with tinkex.ServiceClient(base_url=server.url, api_key=server.key) as service:
        sampler = service.create_sampling_client(base_model=MODEL)
        params = types.SamplingParams(max_tokens=60, stop=[], seed=3, temperature=1.0)
        prompt = types.ModelInput.from_ints([5, 6, 7])
        expected = sampler.sample(prompt, 2, params).result(timeout=90)
        futures = [sampler.sample(prompt, 2, params) for _ in range(8)]
        time.sleep(0.1)
        server.restart()
        for future in futures:
            response = future.result(timeout=90)
            assert [s.tokens for s in response.sequences] == [s.tokens for s in expected.sequences]


def test_constrained_samples_in_flight_are_sampled_again(server: KillableServer) -> None:
    wanted = types.StructuredOutput(regex="[a-f]{90,120}")
    params = types.SamplingParams(
        max_tokens=150,
        seed=3,
        structured_output=wanted,
        frequency_penalty=0.3,
        logit_bias={9: 1.0},
        min_p=0.01,
    )
    with tinkex.ServiceClient(base_url=server.url, api_key=server.key) as service:
        sampler = service.create_sampling_client(base_model=MODEL)
        prompt = types.ModelInput.from_ints([5, 6, 7])
        expected = sampler.sample(prompt, 2, params).result(timeout=90)
        assert [sequence.stop_reason for sequence in expected.sequences] == ["stop", "stop"]
        futures = [sampler.sample(prompt, 2, params) for _ in range(8)]
        server.restart()
        for future in futures:
            response = future.result(timeout=90)
            assert [s.tokens for s in response.sequences] == [s.tokens for s in expected.sequences]


OFFICIAL = """
import json, sys
import tinker
from tinker import types

service = tinker.ServiceClient()
training = service.create_lora_training_client(base_model=sys.argv[1], rank=4, seed=7)
def datum(tokens):
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs={"target_tokens": tokens[1:]})
losses = []
for n, tokens in enumerate(json.loads(sys.argv[2])):
    passed = training.forward_backward([datum(tokens)], "cross_entropy")
    stepped = training.optim_step(types.AdamParams(learning_rate=1e-2))
    if n % 3 == 2:
        losses.append(passed.result().metrics["loss:sum"])
    print(n, flush=True)
training.save_state("end").result()
logprobs = training.forward([datum(tokens)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
print(json.dumps({"losses": losses, "logprobs": list(logprobs), "step": stepped.result().metrics["step:unique"]}))
"""


def test_the_official_client_sees_a_delay_and_the_same_results(tiny_model: Path, tmp_path: Path) -> None:
    sentences = [[(n * 31 + 7 * j) % 190 + 5 for j in range(13)] for n in range(9)]

    def datum_of(tokens: list[int]) -> types.Datum:
        return types.Datum(types.ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})

    with KillableServer(tmp_path, tiny_model, often=4) as server:
        with tinkex.ServiceClient(base_url=server.url, api_key=server.key) as service:
            training = service.create_lora_training_client(MODEL, rank=4, seed=7)
            losses = []
            for tokens in sentences:
                losses.append(training.forward_backward([datum_of(tokens)], "cross_entropy"))
                training.optim_step(types.AdamParams(learning_rate=1e-2))
            last = training.forward([datum_of(tokens)], "cross_entropy").result(timeout=90)
            expected = {
                "losses": [future.result().metrics["loss:sum"] for future in losses[2::3]],
                "logprobs": list(last.loss_fn_outputs[0]["logprobs"].data),
                "step": len(sentences),
            }
        environment = {
            **os.environ,
            "TINKER_BASE_URL": server.url,
            "TINKER_API_KEY": server.key,
            "PYTHONWARNINGS": "ignore",
        }
        command = official_command("-c", OFFICIAL, MODEL, json.dumps(sentences))
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert process.stdout is not None
        line = ""
        with process.stdout:
            for line in process.stdout:
                if line.strip() == "4":
                    server.restart()
        assert process.wait(90) == 0
        assert json.loads(line) == expected
        server.wait()
        assert "other digits" not in server.log


GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "server.md"


@pytest.mark.timeout(900)
def test_the_program_of_the_guide_prints_the_same_losses_after_kills(server: KillableServer) -> None:
    shown = re.search(r"as `train.py`:\n\n```py\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert shown is not None
    server.wait()
    tokens = list(range(10, 42))
    with tinkex.ServiceClient(base_url=server.url, api_key=server.key) as service:
        training = service.create_lora_training_client(MODEL, rank=8, seed=1)
        example = types.Datum(types.ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})
        passes = []
        for _ in range(20):
            passes.append(training.forward_backward([example], "cross_entropy"))
            training.optim_step(types.AdamParams(learning_rate=1e-3))
        expected = [f"{n} {each.result(timeout=180).metrics['loss:sum']}" for n, each in enumerate(passes)]
    environment = {
        **os.environ,
        "TINKER_BASE_URL": server.url,
        "TINKER_API_KEY": server.key,
        "PYTHONWARNINGS": "ignore",
    }
    process = subprocess.Popen(
        official_command("-c", shown[1]), stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    lines = []
    with process.stdout:
        for line in process.stdout:
            lines.append(line.strip())
            if len(lines) == 5:
                server.restart()
            if len(lines) == 12:
                server.kill_workers()
    assert process.wait(180) == 0
    assert lines == expected


def test_a_server_killed_while_it_starts_loses_nothing(server: KillableServer) -> None:
    with tinkex.ServiceClient(base_url=server.url, api_key=server.key) as service:
        training = service.create_lora_training_client(MODEL, rank=4, seed=1)
        for n in range(4):
            training.forward_backward([datum(n)], "cross_entropy")
            last = training.optim_step(types.AdamParams(learning_rate=1e-2))
        server.restart()
        for pause_s in (0.3, 1.0):
            time.sleep(pause_s)
            server.restart()
        metrics = last.result(timeout=90).metrics
        assert metrics is not None
        assert metrics["step:unique"] == 4


def test_many_samples_behind_one_poll_all_arrive(server: KillableServer) -> None:
    with tinkex.ServiceClient(base_url=server.url, api_key=server.key) as service:
        sampler = service.create_sampling_client(base_model=MODEL)
        params = types.SamplingParams(max_tokens=30, stop=[], seed=5)
        prompts = [types.ModelInput.from_ints([5, 6 + n]) for n in range(40)]

        def draw(disturb: bool) -> list[list[int]]:
            futures = [sampler.sample(prompt, 1, params) for prompt in prompts]
            if disturb:
                server.restart()
            return [list(future.result(timeout=90).sequences[0].tokens) for future in futures]

        assert draw(disturb=True) == draw(disturb=False)


def test_an_uploaded_loss_and_its_passes_survive(server: KillableServer) -> None:
    def neg_ll(logprobs: Any, weights: Any) -> Any:
        loss = -(logprobs * weights).sum()
        return loss, {"custom/neg_ll:sum": loss}

    def weighted(seed: int) -> types.Datum:
        plain = datum(seed)
        return types.Datum(plain.model_input, {**plain.loss_fn_inputs, "weights": [0.5] * 16})

    def run(disturb: bool) -> list[float]:
        with tinkex.ServiceClient(base_url=server.url, api_key=server.key) as service:
            training = service.create_lora_training_client(MODEL, rank=4, seed=7)
            loss = service.create_custom_loss(neg_ll, {"logprobs": 1, "weights": 1}).result(timeout=90)
            passes = []
            for n in range(6):
                passes.append(training.forward_backward_custom([weighted(n)], loss))
                training.optim_step(types.AdamParams(learning_rate=1e-2))
                if disturb and n == 3:
                    server.restart()
            return [future.result(timeout=90).metrics["custom/neg_ll:sum"] for future in passes]

    assert run(disturb=True) == run(disturb=False)
    assert "other digits" not in server.log
