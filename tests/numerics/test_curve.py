"""Twenty seeded steps reproduce the committed curve of each loss.

The curve is that of ``curve.json`` beside this file. It belongs to the tiny model, data and settings below; to
change one of them on purpose, write it again with ``python -m tests.numerics.test_curve`` and review the difference.
"""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.unit.engine.trainer.graphs import traced
from tests.unit.engine.trainer.harness import in_double, random_datum, run_one, small_transformer
from tinkex.engine.model.transformer import Transformer
from tinkex.engine.trainer.losses import LOSSES
from tinkex.engine.trainer.trainer import Trainer, TrainJob
from tinkex.types.inputs import Datum
from tinkex.types.training import AdamParams, LoraConfig

CURVE = Path(__file__).with_name("curve.json")
STEPS = 20
NAMES = [*sorted(LOSSES), "custom"]
SETTINGS = AdamParams(learning_rate=5e-3, beta1=0.9, beta2=0.95, weight_decay=0.01, grad_clip_norm=5.0)
# Between fp32 and fp64 the curves part by less than a tenth of this, so another machine's rounding stays within it.
RELATIVE, ABSOLUTE = 1e-3, 1e-4


def likelihood(logprobs: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = -(logprobs * weights).sum() + 0.05 * logprobs.square().mean()
    return loss, {}


def batch(loss_fn: str, step: int) -> list[Datum]:
    """Two datums of this step's own seed; steps alternate between four batches, so that there is something to learn."""
    random = np.random.default_rng(100 + step % 4)
    data_of = "cross_entropy" if loss_fn == "custom" else loss_fn
    return [random_datum(data_of, random, length) for length in (11, 6)]


def curve_of(model: Transformer, loss_fn: str) -> dict[str, list[float]]:
    """The loss and the gradient norm of every step."""
    trainer = Trainer(model)
    state = trainer.create(LoraConfig(rank=4, seed=7))
    state.adapter = state.adapter.with_params(state.adapter.params.to(model.dtype))
    graph = traced(likelihood, logprobs=1, weights=1) if loss_fn == "custom" else None
    losses, norms = [], []
    for step in range(STEPS):
        output = run_one(trainer, TrainJob(state, batch(loss_fn, step), loss_fn, custom_loss=graph))
        losses.append(output.metrics["loss:sum"])
        norms.append(trainer.optim_step(state, SETTINGS)["unclipped_grad_l2:mean"])
    return {"loss": losses, "gradient_norm": norms}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    return small_transformer(tmp_path_factory.mktemp("small"))


@pytest.mark.slow
@pytest.mark.parametrize("loss_fn", NAMES)
def test_twenty_seeded_steps_follow_the_committed_curve(model: Transformer, loss_fn: str) -> None:
    committed = json.loads(CURVE.read_text())[loss_fn]
    curve = curve_of(model, loss_fn)
    for name, values in curve.items():
        np.testing.assert_allclose(values, committed[name], rtol=RELATIVE, atol=ABSOLUTE, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("loss_fn", NAMES)
def test_fp32_follows_the_curve_of_fp64(model: Transformer, loss_fn: str) -> None:
    single, double = curve_of(model, loss_fn), curve_of(in_double(model), loss_fn)
    for name, values in single.items():
        np.testing.assert_allclose(values, double[name], rtol=RELATIVE / 10, atol=ABSOLUTE / 10, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("loss_fn", ["cross_entropy", "gspo"])
def test_the_same_steps_again_give_the_same_bits(model: Transformer, loss_fn: str) -> None:
    assert curve_of(model, loss_fn) == curve_of(model, loss_fn)


def test_the_committed_curve_learns_something() -> None:
    for loss_fn, curve in json.loads(CURVE.read_text()).items():
        assert len(curve["loss"]) == len(curve["gradient_norm"]) == STEPS
        assert all(math.isfinite(value) for value in curve["loss"])
        if loss_fn != "cispo":  # whose value is not what it minimises: no gradient flows through its ratio
            assert np.mean(curve["loss"][-4:]) < np.mean(curve["loss"][:4]), loss_fn


def write_curve() -> None:
    with tempfile.TemporaryDirectory() as directory:
        model = small_transformer(Path(directory))
        curves = {loss_fn: curve_of(model, loss_fn) for loss_fn in NAMES}
    CURVE.write_text(json.dumps(curves, indent=1) + "\n")


if __name__ == "__main__":
    write_curve()
