"""Passes whose custom losses take long are cut between datums, and give the same numbers to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.engine.trainer.graphs import traced
from tests.unit.engine.trainer.harness import random_datum, small_transformer, trained_state
from tinkex.engine.model.transformer import Transformer
from tinkex.engine.trainer.trainer import Trainer, TrainJob
from tinkex.errors import InvalidInput, NumericalError
from tinkex.types.losses import ForwardBackwardOutput

pytestmark = pytest.mark.slow

UNLIMITED = 2**62


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    return small_transformer(tmp_path_factory.mktemp("small"))


def squares(logprobs: torch.Tensor) -> Any:
    loss = logprobs.square().sum()
    return loss, {"custom/squares:sum": loss.detach()}


def inverse(logprobs: torch.Tensor) -> Any:
    return (1 / (logprobs - logprobs)).sum(), {}


def jobs(trainer: Trainer, *, loss: Any = squares, backward: bool = True) -> list[TrainJob]:
    """Two with a custom loss and one without, which share passes."""
    random = np.random.default_rng(0)
    data = [[random_datum("cross_entropy", random, length) for length in (3, 9, 5, 7)] for _ in range(3)]
    states = [trained_state(trainer, seed=seed) for seed in range(3)]
    graph = traced(loss, logprobs=1)
    return [
        TrainJob(states[0], data[0], "custom", backward=backward, custom_loss=graph),
        TrainJob(states[1], data[1], "cross_entropy", backward=backward),
        TrainJob(states[2], data[2], "custom", backward=backward, custom_loss=traced(squares, logprobs=1)),
    ]


def run_in_slices(trainer: Trainer, started: list[TrainJob]) -> tuple[int, list[Any]]:
    """How often it was suspended, and the outputs."""
    slices = trainer.run_in_slices(started)
    count = 0
    while True:
        try:
            next(slices)
        except StopIteration as ended:
            return count, ended.value
        count += 1


def comparable(started: list[TrainJob], outputs: list[Any]) -> list[Any]:
    """All numbers of a pass, as bytes."""
    found: list[Any] = []
    for job, output in zip(started, outputs, strict=True):
        gradient = job.state.grad
        found += [None if gradient is None else gradient.numpy().tobytes(), job.effort.spent]
        if isinstance(output, ForwardBackwardOutput):
            found += [output.metrics]
            found += [
                {name: tensor.to_numpy().tobytes() for name, tensor in record.items()}
                for record in output.loss_fn_outputs
            ]
        else:
            found.append(repr(output))
    return found


@pytest.mark.parametrize("max_tokens", [1, 16, 2048], ids="budget {}".format)
@pytest.mark.parametrize("backward", [True, False])
def test_a_pass_in_slices_has_the_same_numbers_as_in_one(
    model: Transformer, max_tokens: int, backward: bool
) -> None:
    whole = Trainer(model, max_tokens_per_pass=max_tokens, slice_effort=UNLIMITED)
    cut = Trainer(model, max_tokens_per_pass=max_tokens, slice_effort=1)
    expected = jobs(whole, backward=backward)
    not_suspended, outputs = run_in_slices(whole, expected)
    started = jobs(cut, backward=backward)
    suspended, cut_outputs = run_in_slices(cut, started)
    assert (not_suspended, suspended) == (0, 7)  # between any two of the eight datums with a custom loss
    assert comparable(started, cut_outputs) == comparable(expected, outputs)


def test_a_loss_that_fails_in_the_middle_fails_alone_and_in_the_same_way(model: Transformer) -> None:
    whole, cut = Trainer(model, slice_effort=UNLIMITED), Trainer(model, slice_effort=1)
    expected, started = jobs(whole, loss=inverse), jobs(cut, loss=inverse)
    outputs, (_, cut_outputs) = whole.run(expected), run_in_slices(cut, started)
    assert isinstance(cut_outputs[0], NumericalError | InvalidInput)
    assert comparable(started, cut_outputs) == comparable(expected, outputs)


def test_run_does_not_stop_between_slices(model: Transformer, tmp_path: Path) -> None:
    trainer = Trainer(model, slice_effort=1)
    assert all(isinstance(output, ForwardBackwardOutput) for output in trainer.run(jobs(trainer)))
