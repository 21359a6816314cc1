"""Sampler checkpoints are read by both kinds of tools: the official cookbook merges the archive, PEFT loads the download."""

from __future__ import annotations

import json
import os
import subprocess
import tarfile
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

import tinkex
from tests.models import tiny_llama
from tests.official_process import official_command
from tests.parity.conformance import installed
from tests.servers import ServedEngine, serve
from tinkex import types
from tinkex.checkpoints import download_checkpoint

TOKENS = [5, 9, 6, 33, 7, 8, 21, 4]
MERGE = """import sys
from tinker_cookbook.weights import build_hf_model
base, adapter, merged = sys.argv[1:]
build_hf_model(base_model=base, adapter_path=adapter, output_path=merged, merge_strategy="shard")
"""

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning:peft")]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    folder = tmp_path_factory.mktemp("bases")
    return {name: tiny_llama(folder / name, tie=name == "tied") for name in ("tied", "untied")}


@pytest.fixture(scope="module")
def server(bases: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedEngine]:
    models = [f"--model={name}={base}" for name, base in bases.items()]
    with serve(tmp_path_factory.mktemp("home"), *models) as served:
        yield served


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_the_cookbook_merges_the_archive_and_peft_loads_the_download(
    name: str, bases: Mapping[str, Path], server: ServedEngine, tmp_path: Path
) -> None:
    login = {"base_url": server.url, "api_key": server.key}
    with tinkex.ServiceClient(**login) as service:
        training = service.create_lora_training_client(name, rank=4, seed=1)
        datum = types.Datum(types.ModelInput.from_ints(TOKENS[:-1]), {"target_tokens": TOKENS[1:]})
        for _ in range(2):
            training.forward_backward([datum], "cross_entropy")
            training.optim_step(types.AdamParams(learning_rate=0.05))
        path = training.save_weights_for_sampler("trained").result().path
        sampler = service.create_sampling_client(model_path=path)
        logprobs = sampler.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result()[1:]
        url = service.create_rest_client().get_checkpoint_archive_url_from_tinker_path(path).result().url

    urllib.request.urlretrieve(url, tmp_path / "archive.tar")
    with tarfile.open(tmp_path / "archive.tar") as archive:
        archive.extractall(tmp_path / "archive", filter="data")
    head = "model.embed_tokens.weight" if name == "tied" else "lm_head.weight"
    assert_merged(bases[name], tmp_path / "archive", tmp_path / "merged", head)

    downloaded = download_checkpoint(path, tmp_path / "downloads", **login).directory
    model = AutoModelForCausalLM.from_pretrained(bases[name], dtype=torch.float32)
    with torch.no_grad():
        adapted = peft.PeftModel.from_pretrained(model, downloaded).eval()
        scores = adapted(torch.tensor([TOKENS])).logits[0].log_softmax(-1)
    theirs = [scores[place, token].item() for place, token in enumerate(TOKENS[1:])]
    np.testing.assert_allclose(np.array(logprobs, float), theirs, atol=1e-4)


def assert_merged(base: Path, adapter: Path, merged: Path, head: str) -> None:
    """Merges with the cookbook, which adds each pair of the adapter to its weight, and that of the head to ``head``."""
    done = subprocess.run(
        official_command("-c", MERGE, str(base), str(adapter), str(merged)),
        env={**os.environ, "PYTHONPATH": str(installed("tinker-cookbook", "0.5.8"))},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    config = json.loads((adapter / "adapter_config.json").read_text())
    pairs = load_file(adapter / "adapter_model.safetensors")
    before, after = load_file(base / "model.safetensors"), load_file(merged / "model.safetensors")
    changed = set()
    for name, b in pairs.items():
        if ".lora_B" in name:
            module = name.removeprefix("base_model.model.").removesuffix(".lora_B.weight")
            weight = head if module in {"model.unembed_tokens", "lm_head"} else f"{module}.weight"
            delta = b @ pairs[name.replace("lora_B", "lora_A")] * (config["lora_alpha"] / config["r"])
            np.testing.assert_allclose(after[weight], before[weight] + delta, atol=1e-5, err_msg=weight)
            changed.add(weight)
    assert head in changed
    assert {name for name in before if (after[name] != before[name]).any()} == changed
