from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tinkex.checkpoints.peft_names import name_head_for_peft

LAYER = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def adapter(directory: Path, head: str) -> dict[str, np.ndarray]:
    directory.mkdir()
    random = np.random.default_rng(0)
    names = [LAYER, f"base_model.model.{head}.lora_A.weight", f"base_model.model.{head}.lora_B.weight"]
    tensors = {name: random.random((3, 5), np.float32) for name in names}
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"r": 3, "target_modules": ["q_proj", head.rpartition(".")[2]]}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    (directory / "manifest.json").write_text("{}")
    return tensors


def test_a_head_with_the_services_name_gets_that_of_peft(tmp_path: Path) -> None:
    tensors = adapter(tmp_path / "a", "model.unembed_tokens")
    name_head_for_peft(tmp_path / "a")
    found = load_file(tmp_path / "a" / "adapter_model.safetensors")
    assert set(found) == {
        LAYER,
        "base_model.model.lm_head.lora_A.weight",
        "base_model.model.lm_head.lora_B.weight",
    }
    for name, tensor in tensors.items():
        assert (found[name.replace("model.unembed_tokens", "lm_head")] == tensor).all()
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["lm_head", "q_proj"]
    assert not (tmp_path / "a" / "manifest.json").exists()


@pytest.mark.parametrize("head", ["lm_head", "model.layers.1.mlp.up_proj"])
def test_other_adapters_are_not_touched(tmp_path: Path, head: str) -> None:
    adapter(tmp_path / "a", head)
    before = {file.name: file.read_bytes() for file in (tmp_path / "a").iterdir()}
    name_head_for_peft(tmp_path / "a")
    assert {file.name: file.read_bytes() for file in (tmp_path / "a").iterdir()} == before


def test_files_that_are_encrypted_are_not_touched(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors.age").write_bytes(b"secret")
    name_head_for_peft(tmp_path)
    assert (tmp_path / "adapter_model.safetensors.age").read_bytes() == b"secret"
