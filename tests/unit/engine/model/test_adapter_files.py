from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tinkex.engine.model.adapter_files import (
    CONFIG_FILE,
    TINKER_UNEMBED_PATH,
    WEIGHTS_FILE,
    load_adapter,
    save_adapter,
)
from tinkex.engine.model.architecture import Architecture
from tinkex.engine.model.loader import read_architecture
from tinkex.engine.model.lora import Adapter, LoraSpec
from tinkex.errors import InvalidInput


@pytest.fixture
def arch(tiny_model: Path) -> Architecture:
    return read_architecture(tiny_model)


@pytest.fixture
def saved(arch: Architecture, tmp_path: Path) -> Path:
    adapter = Adapter.create(arch, LoraSpec(rank=3, seed=0))
    noise = torch.randn(adapter.params.shape, generator=torch.Generator().manual_seed(1))
    save_adapter(tmp_path / "adapter", adapter.with_params(noise), "tiny/llama")
    return tmp_path / "adapter"


def _change_config(directory: Path, **fields: Any) -> None:
    path = directory / CONFIG_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_a_saved_adapter_has_the_names_peft_uses(saved: Path) -> None:
    config = json.loads((saved / CONFIG_FILE).read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 3, 32)
    assert config["base_model_name_or_path"] == "tiny/llama"
    tensors = load_file(saved / WEIGHTS_FILE)
    assert tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"].shape == (3, 64)
    assert tensors["base_model.model.lm_head.lora_B.weight"].shape == (512, 3)


def test_what_was_saved_loads_bit_for_bit(saved: Path, arch: Architecture) -> None:
    adapter = load_adapter(saved, arch)
    expected = torch.randn(adapter.params.shape, generator=torch.Generator().manual_seed(1))
    assert torch.equal(adapter.params, expected)


def test_the_unembedding_may_be_called_unembed_tokens(saved: Path, arch: Architecture) -> None:
    expected = load_adapter(saved, arch)
    exported = saved.parent / "exported"
    save_adapter(exported, expected, "tiny/llama", unembed_path=TINKER_UNEMBED_PATH)
    assert "base_model.model.model.unembed_tokens.lora_A.weight" in load_file(exported / WEIGHTS_FILE)
    targets = json.loads((exported / CONFIG_FILE).read_text())["target_modules"]
    assert "unembed_tokens" in targets
    assert "lm_head" not in targets
    assert torch.equal(load_adapter(exported, arch).params, expected.params)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"peft_type": "IA3"}, "IA3"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern"),
        ({"rank_pattern": {"(a+)+b": 8}}, "too complex"),
        ({"rank_pattern": {".*.*.*.*b": 8}}, "too complex"),
        ({"rank_pattern": {"q" * 1000: 8}}, "too complex"),
        ({"alpha_pattern": {"q_proj": "8"}}, "alpha_pattern"),
        ({"alpha_pattern": {"q_proj(": 8}}, "alpha_pattern"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"target_parameters": ["mlp.experts"]}, "target_parameters"),
        ({"init_lora_weights": "pissa"}, "pissa"),
        ({"lora_bias": True}, "lora_bias"),
        ({"arrow_config": {"top_k": 1}}, "arrow_config"),
        ({"some_new_option": 1}, "some_new_option"),
        ({"r": "8"}, "r '8'"),
        ({"r": True}, "r True"),
        ({"lora_alpha": None}, "lora_alpha"),
        ({"lora_alpha": float("nan")}, "lora_alpha"),
    ],
)
def test_options_that_cannot_be_honoured_are_rejected_and_named(
    saved: Path, arch: Architecture, fields: dict[str, Any], name: str
) -> None:
    _change_config(saved, **fields)
    with pytest.raises(InvalidInput, match=name):
        load_adapter(saved, arch)


def test_rank_stabilized_scaling_is_honoured(saved: Path, arch: Architecture) -> None:
    _change_config(saved, use_rslora=True, lora_alpha=8)
    assert load_adapter(saved, arch).spec.scale == pytest.approx(8 / 3**0.5)


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("base_model.model.model.embed_tokens.lora_embedding_A", torch.zeros(3, 512), "input embeddings"),
        ("base_model.model.model.embed_tokens.weight", torch.zeros(512, 64), "input embeddings"),
        ("base_model.model.model.layers.0.mlp.up_proj.lora_magnitude_vector", torch.zeros(128), "DoRA"),
        ("base_model.model.lm_head.weight", torch.zeros(512, 64), "replaces the unembedding"),
        ("base_model.model.score.lora_A.weight", torch.zeros(3, 64), "is not part of"),
        ("base_model.model.model.layers.7.mlp.up_proj.lora_A.weight", torch.zeros(3, 64), "layer 7"),
        ("base_model.model.model.layers.0.mlp.up_proj.lora_A.weight", torch.zeros(2, 64), r"is \(2, 64\)"),
        ("base_model.model.model.layers.0.mlp.up_proj.lora_A.weight", None, "only lora_B"),
        ("base_model.model.model.unembed_tokens.lora_A.weight", torch.zeros(3, 64), "twice"),
        ("base_model.model.lm_head.base_layer.weight", torch.zeros(600, 64), "resized vocabulary"),
    ],
)
def test_tensors_without_a_place_are_rejected_and_named(
    saved: Path, arch: Architecture, name: str, tensor: torch.Tensor | None, words: str
) -> None:
    tensors = load_file(saved / WEIGHTS_FILE)
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    save_file(tensors, saved / WEIGHTS_FILE)
    with pytest.raises(InvalidInput, match=words):
        load_adapter(saved, arch)


@pytest.mark.parametrize(
    ("name", "words"), [(CONFIG_FILE, "not a PEFT adapter"), (WEIGHTS_FILE, "only safetensors")]
)
def test_a_missing_file_is_named(saved: Path, arch: Architecture, name: str, words: str) -> None:
    (saved / name).unlink()
    with pytest.raises(InvalidInput, match=words):
        load_adapter(saved, arch)


def test_a_rank_that_the_tensors_do_not_have_takes_no_memory(saved: Path, arch: Architecture) -> None:
    _change_config(saved, r=10**12)
    with pytest.raises(InvalidInput, match=r"is \(3, 64\), and the base model needs \(1000000000000, 64\)"):
        load_adapter(saved, arch)


def test_a_pickled_adapter_is_rejected_and_named(saved: Path, arch: Architecture) -> None:
    (saved / WEIGHTS_FILE).rename(saved / "adapter_model.bin")
    with pytest.raises(InvalidInput, match=r"only in adapter_model\.bin, which can run code"):
        load_adapter(saved, arch)


def test_the_prefix_of_peft_and_the_name_of_an_adapter_may_vary(saved: Path, arch: Architecture) -> None:
    expected = load_adapter(saved, arch)
    tensors = load_file(saved / WEIGHTS_FILE)
    renamed = {
        name.removeprefix("base_model.model.").replace(".weight", ".default.weight"): tensor
        for name, tensor in tensors.items()
    }
    save_file(renamed, saved / WEIGHTS_FILE)
    assert torch.equal(load_adapter(saved, arch).params, expected.params)


def test_modules_of_smaller_rank_are_filled_up_with_ranks_that_change_nothing_and_can_train(
    saved: Path, arch: Architecture
) -> None:
    tensors = load_file(saved / WEIGHTS_FILE)
    name = "base_model.model.model.layers.1.mlp.up_proj"
    tensors[f"{name}.lora_A.weight"] = tensors[f"{name}.lora_A.weight"][:2].contiguous()
    tensors[f"{name}.lora_B.weight"] = tensors[f"{name}.lora_B.weight"][:, :2].contiguous()
    save_file(tensors, saved / WEIGHTS_FILE)
    _change_config(saved, rank_pattern={r"layers\.1\.mlp\.up_proj": 2})
    adapter = load_adapter(saved, arch)
    a, b = adapter.views["up_proj", 1]
    assert adapter.spec.rank == 3
    assert adapter.spec.scale == pytest.approx(32 / 3)
    assert (b[:, 2:] == 0).all()
    assert (a[2:] != 0).all()  # a zero A beside a zero B would never get a gradient
    assert torch.equal(a[:2], tensors[f"{name}.lora_A.weight"])
    # alpha / 2 for this module, alpha / 3 for the adapter: the difference is in B.
    torch.testing.assert_close(b[:, :2], tensors[f"{name}.lora_B.weight"] * 1.5)
    untouched, _ = adapter.views["up_proj", 0]
    assert torch.equal(untouched, tensors["base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"])


@pytest.mark.parametrize("pattern", [{"q_proj": 16.0}, {"q_proj": 0.0}])
def test_modules_whose_alpha_is_zero_add_nothing(
    saved: Path, arch: Architecture, pattern: dict[str, float]
) -> None:
    original = load_adapter(saved, arch)
    _change_config(saved, lora_alpha=0, alpha_pattern=pattern)
    loaded = load_adapter(saved, arch)
    scale = pattern["q_proj"] / original.spec.rank
    for (module, layer), (a, b) in loaded.views.items():
        expected_a, expected_b = original.views[module, layer]
        wanted = expected_b @ expected_a * (scale if module == "q_proj" else 0.0)
        torch.testing.assert_close(b @ a * loaded.spec.scale, wanted)


def test_a_corrupt_file_is_an_input_error(saved: Path, arch: Architecture) -> None:
    (saved / WEIGHTS_FILE).write_bytes(b"nothing")
    with pytest.raises(InvalidInput, match="cannot be read as safetensors"):
        load_adapter(saved, arch)
