"""The unmodified official client in its own process against a real `tinkex serve`."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.official_process import official_command
from tests.servers import ServedEngine

pytestmark = pytest.mark.slow

PROGRAM = """
import json, sys
import tinker
from tinker import types

service = tinker.ServiceClient()
model = sys.argv[1]
training = service.create_lora_training_client(base_model=model, rank=8, seed=0)
sentences = [[(7 * i + j) % 200 + 5 for j in range(12 + i)] for i in range(5)]
data = [
    types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
    )
    for tokens in sentences
]
losses = []
for _ in range(6):
    passed = training.forward_backward(data, "cross_entropy")
    stepped = training.optim_step(types.AdamParams(learning_rate=2e-2))
    losses.append(passed.result().metrics["loss:sum"])
    metrics = stepped.result().metrics
state = training.save_state("after-6").result()
sampler = training.save_weights_and_get_sampling_client()
prompt = types.ModelInput.from_ints(sentences[0])
sampled = sampler.sample(prompt, num_samples=3, sampling_params=types.SamplingParams(max_tokens=5, stop=[])).result()
logprobs = sampler.compute_logprobs(prompt).result()
resumed = service.create_training_client_from_state_with_optimizer(state.path)
same = [client.forward(data, "cross_entropy").result().metrics["loss:sum"] for client in (training, resumed)]
for client in (training, resumed):
    client.forward_backward(data, "cross_entropy").result()
    client.optim_step(types.AdamParams(learning_rate=2e-2)).result()
after = [client.forward(data, "cross_entropy").result().metrics["loss:sum"] for client in (training, resumed)]
try:
    training.forward_backward([types.Datum(model_input=types.ModelInput.from_ints([10**6]),
        loss_fn_inputs={"target_tokens": [5]})], "cross_entropy").result()
    rejected = None
except tinker.BadRequestError as error:
    rejected = str(error)
still = training.forward(data, "cross_entropy").result().metrics["loss:sum"]
tokenizer = training.get_tokenizer()
service.close("success").result()
print(json.dumps({
    "losses": losses, "path": state.path, "run": training.model_id, "metrics": sorted(metrics or {}),
    "samples": [len(s.tokens) for s in sampled.sequences], "ids": len({s.sequence_id for s in sampled.sequences}),
    "logprobs": logprobs, "same": same, "after": after, "rejected": rejected, "still": still,
    "text": tokenizer.decode(tokenizer.encode("Hello")),
}))
"""


def test_the_official_client_trains_saves_samples_and_resumes(
    served_engine: ServedEngine, tmp_path: Path
) -> None:
    environment = {
        **os.environ,
        "TINKER_BASE_URL": served_engine.url,
        "TINKER_API_KEY": served_engine.key,
        "TINKER_TELEMETRY": "1",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        official_command("-c", PROGRAM, "tiny/llama"),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["losses"] == sorted(result["losses"], reverse=True)
    assert result["losses"][-1] < 0.9 * result["losses"][0]
    assert result["path"] == f"tinker://{result['run']}/weights/after-6"
    assert result["metrics"]
    assert result["samples"] == [5, 5, 5]
    assert result["ids"] == 3
    assert result["logprobs"][0] is None
    assert all(isinstance(value, float) for value in result["logprobs"][1:])
    assert abs(result["same"][0] - result["same"][1]) < 1e-4
    assert abs(result["after"][0] - result["after"][1]) < 1e-3
    assert "1000000" in result["rejected"]
    assert abs(result["still"] - result["after"][0]) < 1e-4
    assert result["text"] == "Hello"
