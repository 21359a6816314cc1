from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tinkex.engine.checkpoint_export import export_checkpoint
from tinkex.engine.model.adapter_files import WEIGHTS_FILE
from tinkex.engine.model.loader import load_transformer
from tinkex.engine.trainer.trainer import Trainer, TrainJob
from tinkex.errors import EngineFailure
from tinkex.types import AdamParams, Datum, ForwardBackwardOutput, LoraConfig, ModelInput, TensorData

pytestmark = pytest.mark.slow

TOKENS = [5, 60, 7, 80, 9, 100]


@pytest.fixture
def trained(tiny_model: Path, tmp_path: Path) -> tuple[Path, list[float]]:
    """A checkpoint after a few steps, and the logprobs of ``TOKENS`` after the first under it."""
    trainer = Trainer(load_transformer(tiny_model))
    state = trainer.create(LoraConfig(rank=4, seed=0))
    datum = Datum(ModelInput.from_ints(TOKENS[:-1]), {"target_tokens": TensorData(TOKENS[1:], "int64")})
    for _ in range(3):
        trainer.run([TrainJob(state, [datum], "cross_entropy")])
        trainer.optim_step(state, AdamParams(learning_rate=0.05))
    [output] = trainer.run([TrainJob(state, [datum], "cross_entropy", backward=False)])
    assert isinstance(output, ForwardBackwardOutput)
    trainer.save(state, tmp_path / "checkpoint", "tiny", optimizer=True)
    return tmp_path / "checkpoint", output.loss_fn_outputs[0]["logprobs"].tolist()


def test_an_exported_checkpoint_says_in_transformers_what_it_said_in_training(
    trained: tuple[Path, list[float]], tiny_model: Path, tmp_path: Path
) -> None:
    checkpoint, logprobs = trained
    merged = export_checkpoint(checkpoint, tmp_path / "merged", base=tiny_model)
    model = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    with torch.no_grad():
        said = torch.log_softmax(model(torch.tensor([TOKENS])).logits[0, :-1], -1)
    expected = torch.tensor(logprobs)
    torch.testing.assert_close(
        said.gather(1, torch.tensor(TOKENS)[1:, None])[:, 0], expected, rtol=0, atol=1e-4
    )


def test_a_corrupt_checkpoint_is_not_exported(
    trained: tuple[Path, list[float]], tiny_model: Path, tmp_path: Path
) -> None:
    checkpoint, _ = trained
    weights = bytearray((checkpoint / WEIGHTS_FILE).read_bytes())
    weights[-1] ^= 1
    (checkpoint / WEIGHTS_FILE).write_bytes(weights)
    with pytest.raises(EngineFailure, match="corrupt"):
        export_checkpoint(checkpoint, tmp_path / "merged", base=tiny_model)
    assert not (tmp_path / "merged").exists()
