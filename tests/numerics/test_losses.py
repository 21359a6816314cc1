"""Every loss against its definition in fp64, and every gradient against finite differences."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tinkex.engine.trainer.losses import LOSSES, SEQUENCE_LOG_RATIO, read_settings

NAMES = sorted(LOSSES)
SIZE = 64


def definition(name: str, lp: float, frozen_lp: float, x: dict[str, float]) -> float:
    """The loss of one token; ``frozen_lp`` is the logprob wherever no gradient flows."""
    if name == "cross_entropy":
        return -x["weights"] * lp
    advantage, ratio = x["advantages"], np.exp(lp - x["logprobs"])
    low, high = x.get("clip_low_threshold", 0.0), x.get("clip_high_threshold", 0.0)
    if name == "importance_sampling":
        return -ratio * advantage
    if name == "ppo":
        return -min(ratio * advantage, min(max(ratio, low), high) * advantage)
    if name == "cispo":
        frozen_ratio = np.exp(frozen_lp - x["logprobs"])
        return -min(max(frozen_ratio, low), high) * lp * advantage
    if name == "dro":
        return -(lp * advantage - 0.5 * x["beta"] * (lp - x["logprobs"]) ** 2)
    assert name == "gspo"
    ratio = np.exp(x[SEQUENCE_LOG_RATIO]) * np.exp(lp - frozen_lp)
    return -min(ratio * advantage, min(max(ratio, low), high) * advantage)


def inputs_of(name: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    random = np.random.default_rng(7)
    lp = random.normal(-2, 1, SIZE)
    settings = {key: np.full(SIZE, value) for key, value in read_settings(LOSSES[name], None).items()}
    inputs = {
        "weights": random.normal(size=SIZE),
        "logprobs": lp + random.normal(0, 0.5, SIZE),
        "advantages": random.normal(size=SIZE) * (random.random(SIZE) < 0.8),
        SEQUENCE_LOG_RATIO: random.normal(0, 0.3, SIZE),
        **settings,
    }
    return lp, inputs


def tensors(inputs: dict[str, np.ndarray], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {key: torch.tensor(value, dtype=dtype) for key, value in inputs.items()}


@pytest.mark.parametrize("name", NAMES)
def test_a_loss_equals_its_definition_token_by_token(name: str) -> None:
    lp, inputs = inputs_of(name)
    expected = [definition(name, v, v, {k: x[i] for k, x in inputs.items()}) for i, v in enumerate(lp)]
    exact = LOSSES[name].elementwise(torch.tensor(lp), tensors(inputs, torch.float64))
    rounded = LOSSES[name].elementwise(torch.tensor(lp).float(), tensors(inputs, torch.float32))
    np.testing.assert_allclose(exact.numpy(), expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(rounded.numpy(), expected, rtol=1e-5, atol=1e-6)
    assert rounded.dtype == torch.float32


@pytest.mark.parametrize("name", NAMES)
def test_a_gradient_equals_central_finite_differences(name: str) -> None:
    lp, inputs = inputs_of(name)
    step = 1e-6
    expected = []
    for i, v in enumerate(lp):
        token = {k: float(x[i]) for k, x in inputs.items()}
        expected.append(
            (definition(name, v + step, v, token) - definition(name, v - step, v, token)) / (2 * step)
        )
    _, exact = LOSSES[name].elementwise_and_gradient(torch.tensor(lp), tensors(inputs, torch.float64))
    _, rounded = LOSSES[name].elementwise_and_gradient(
        torch.tensor(lp).float(), tensors(inputs, torch.float32)
    )
    np.testing.assert_allclose(exact.numpy(), expected, rtol=1e-7, atol=1e-8)
    np.testing.assert_allclose(rounded.numpy(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),  # inside the bounds: −r·A, and the same again as gradient
        (1.5, 2.0, -2.4, 0.0),  # too likely already: held at the upper bound
        (1.5, -2.0, 3.0, 3.0),  # too likely and bad: pushed down
        (0.5, 2.0, -1.0, -1.0),  # too unlikely and good: pulled up
        (0.5, -2.0, 1.6, 0.0),  # too unlikely already: held at the lower bound
    ],
)
def test_ppo_clips_only_where_that_is_pessimistic(
    ratio: float, advantage: float, loss: float, gradient: float
) -> None:
    values = {"logprobs": 0.0, "advantages": advantage, "clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    inputs = {key: torch.tensor([value], dtype=torch.float64) for key, value in values.items()}
    losses, gradients = LOSSES["ppo"].elementwise_and_gradient(torch.tensor([ratio]).double().log(), inputs)
    assert losses.item() == pytest.approx(loss)
    assert gradients.item() == pytest.approx(gradient)


def test_cispo_keeps_the_gradient_of_a_clipped_token() -> None:
    values = {"logprobs": 0.0, "advantages": 1.0, "clip_low_threshold": 0.0, "clip_high_threshold": 4.0}
    inputs = {key: torch.tensor([value], dtype=torch.float64) for key, value in values.items()}
    _, gradients = LOSSES["cispo"].elementwise_and_gradient(torch.tensor([9.0]).double().log(), inputs)
    assert gradients.item() == pytest.approx(-4.0)


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo", "gspo"])
def test_a_token_without_advantage_costs_nothing_whatever_its_placeholder_logprob(name: str) -> None:
    inputs = {key: torch.tensor([value[0]]).float() for key, value in inputs_of(name)[1].items()}
    inputs |= {"advantages": torch.zeros(1), "logprobs": torch.tensor([-1e4])}
    losses, gradients = LOSSES[name].elementwise_and_gradient(torch.tensor([-1.0]), inputs)
    assert losses.item() == 0
    assert gradients.item() == 0


@pytest.mark.parametrize("name", ["ppo", "gspo"])
def test_a_ratio_beyond_fp32_does_no_harm_where_it_is_clipped(name: str) -> None:
    values = {"logprobs": -1e4, "advantages": 2.0, "clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    inputs = {key: torch.tensor([value]) for key, value in {**values, SEQUENCE_LOG_RATIO: 1e4}.items()}
    losses, gradients = LOSSES[name].elementwise_and_gradient(torch.tensor([-1.0]), inputs)
    assert losses.item() == pytest.approx(-2.4)
    assert gradients.item() == 0
