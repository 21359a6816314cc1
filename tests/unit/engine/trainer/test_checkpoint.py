"""Checkpoints are complete or rejected, and say what does not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.unit.engine.trainer.harness import small_transformer, trained_state
from tinkex.engine.model.transformer import Transformer
from tinkex.engine.trainer.checkpoint import verify_manifest, write_manifest
from tinkex.engine.trainer.trainer import Trainer, TrainState
from tinkex.errors import EngineFailure, InvalidInput
from tinkex.types.training import AdamParams, LoraConfig


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    return small_transformer(tmp_path_factory.mktemp("small"))


@pytest.fixture
def trainer(model: Transformer) -> Trainer:
    return Trainer(model)


@pytest.fixture
def saved(trainer: Trainer, tmp_path: Path) -> Path:
    state = trained_state(trainer)
    state.grad = torch.ones_like(state.adapter.params)
    trainer.optim_step(state, AdamParams())
    trainer.save(state, tmp_path / "saved", "tiny", optimizer=True)
    return tmp_path / "saved"


def contents(state: TrainState) -> tuple[torch.Tensor, int]:
    return state.adapter.params.clone(), state.step


def test_a_checkpoint_is_a_peft_directory_with_a_manifest(saved: Path) -> None:
    names = {path.name for path in saved.iterdir()}
    assert names == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "optimizer.safetensors",
        "manifest.json",
    }
    assert set(json.loads((saved / "manifest.json").read_text())["files"]) == names - {"manifest.json"}


def test_loading_without_the_optimizer_starts_adam_from_zero(trainer: Trainer, saved: Path) -> None:
    state = trainer.create(LoraConfig(rank=4))
    state.grad = torch.ones_like(state.adapter.params)
    trainer.optim_step(state, AdamParams())
    trainer.load(state, saved, optimizer=False)
    assert (state.step, state.exp_avg, state.exp_avg_sq, state.grad) == (0, None, None, None)


def test_a_checkpoint_without_optimizer_is_rejected_where_one_is_wanted(
    trainer: Trainer, saved: Path
) -> None:
    state = trained_state(trainer)
    trainer.save(state, saved, "tiny", optimizer=False)
    trainer.load(state, saved, optimizer=False)
    with pytest.raises(InvalidInput, match="optimizer=False"):
        trainer.load(state, saved, optimizer=True)


def test_a_state_that_never_stepped_is_saved_as_such(trainer: Trainer, tmp_path: Path) -> None:
    trainer.save(trainer.create(LoraConfig(rank=4)), tmp_path / "fresh", "tiny", optimizer=True)
    state = trained_state(trainer)
    trainer.load(state, tmp_path / "fresh", optimizer=True)
    assert (state.step, state.exp_avg) == (0, None)


@pytest.mark.parametrize(
    "name", ["adapter_model.safetensors", "optimizer.safetensors", "adapter_config.json"]
)
def test_a_corrupt_file_is_named_and_nothing_is_loaded(trainer: Trainer, saved: Path, name: str) -> None:
    damaged = bytearray((saved / name).read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (saved / name).write_bytes(damaged)
    state = trained_state(trainer, seed=5)
    params, step = contents(state)
    with pytest.raises(EngineFailure, match=f"{name} is corrupt"):
        trainer.load(state, saved, optimizer=True)
    assert torch.equal(state.adapter.params, params)
    assert state.step == step


def test_a_missing_file_is_named(saved: Path) -> None:
    (saved / "optimizer.safetensors").unlink()
    with pytest.raises(EngineFailure, match=r"lacks optimizer\.safetensors"):
        verify_manifest(saved)


def test_a_checkpoint_that_is_incomplete_is_rejected(trainer: Trainer, saved: Path) -> None:
    (saved / "manifest.json").unlink()
    with pytest.raises(EngineFailure, match="incomplete"):
        trainer.load(trained_state(trainer), saved, optimizer=True)


def test_a_corrupt_manifest_is_rejected(saved: Path) -> None:
    (saved / "manifest.json").write_text('{"files": [')
    with pytest.raises(EngineFailure, match="cannot be read"):
        verify_manifest(saved)


@pytest.mark.parametrize("lora", [{"rank": 8}, {"rank": 4, "train_mlp": False}])
def test_another_kind_of_adapter_is_rejected_naming_both(
    trainer: Trainer, saved: Path, lora: dict[str, int]
) -> None:
    state = trainer.create(LoraConfig(**lora))
    with pytest.raises(InvalidInput) as caught:
        trainer.load(state, saved, optimizer=False)
    assert "rank=4, train_attn=True, train_mlp=True" in str(caught.value)
    assert f"rank={state.adapter.spec.rank}" in str(caught.value)


def test_moments_of_another_adapter_are_rejected(trainer: Trainer, saved: Path) -> None:
    from safetensors.torch import save_file

    save_file(
        {"exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3)},
        saved / "optimizer.safetensors",
        metadata={"step": "1"},
    )
    write_manifest(saved)
    with pytest.raises(EngineFailure, match="moments"):
        trainer.load(trained_state(trainer), saved, optimizer=True)


def test_what_becomes_of_the_files_after_loading_does_not_reach_the_run(
    trainer: Trainer, saved: Path
) -> None:
    state, other = trainer.create(LoraConfig(rank=4)), trainer.create(LoraConfig(rank=4))
    trainer.load(state, saved, optimizer=True)
    trainer.load(other, saved, optimizer=True)
    trainer.optim_step(other, AdamParams())
    for name in ("adapter_model.safetensors", "optimizer.safetensors"):
        file = saved / name
        file.write_bytes(b"\xff" * file.stat().st_size)
    trainer.optim_step(state, AdamParams())
    assert torch.equal(state.adapter.params, other.adapter.params)
