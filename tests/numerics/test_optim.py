"""AdamW against torch's own, step by step, and the norms it reports."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tinkex.engine.model.lora import Adapter, LoraLayout, LoraSpec
from tinkex.engine.trainer.optim import adam_step, l2_norm
from tinkex.engine.trainer.state import TrainState
from tinkex.types.training import AdamParams

pytestmark = pytest.mark.slow

SIZE = 10_000
SETTINGS = {
    "defaults": AdamParams(),
    "decay": AdamParams(learning_rate=1e-2, weight_decay=0.1),
    "no momentum": AdamParams(learning_rate=1e-3, beta1=0.0, beta2=0.0, eps=1e-3),
    "large eps": AdamParams(learning_rate=1e-1, beta1=0.5, beta2=0.999, eps=1e-2),
}


def state_of(size: int = SIZE) -> TrainState:
    params = torch.randn(size, generator=torch.Generator().manual_seed(0))
    return TrainState(Adapter(LoraSpec(rank=1, seed=0), LoraLayout(1, (), size), params))


def gradients(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(SIZE, generator=generator) * 10.0**-n for n in range(count)]


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_steps_equal_those_of_torch_in_double(settings: AdamParams) -> None:
    state = state_of()
    reference = torch.nn.Parameter(state.adapter.params.double())
    optimizer = torch.optim.AdamW(
        [reference],
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        foreach=False,
    )
    for gradient in gradients(5):
        state.grad = gradient.clone()
        reference.grad = gradient.double()
        adam_step(state, settings)
        optimizer.step()
        np.testing.assert_allclose(
            state.adapter.params.numpy(), reference.detach().numpy(), rtol=2e-6, atol=2e-7
        )
    assert state.step == 5


def test_settings_may_change_from_step_to_step() -> None:
    state = state_of()
    reference = torch.nn.Parameter(state.adapter.params.double())
    optimizer = torch.optim.AdamW([reference], foreach=False)
    for gradient, settings in zip(gradients(4), SETTINGS.values(), strict=True):
        group = optimizer.param_groups[0]
        group["lr"], group["eps"] = settings.learning_rate, settings.eps
        group["betas"], group["weight_decay"] = (settings.beta1, settings.beta2), settings.weight_decay
        state.grad = gradient.clone()
        reference.grad = gradient.double()
        adam_step(state, settings)
        optimizer.step()
    np.testing.assert_allclose(state.adapter.params.numpy(), reference.detach().numpy(), rtol=2e-6, atol=2e-7)


def test_fifty_steps_with_decay_clipping_and_a_changing_rate_equal_those_of_torch_in_double() -> None:
    state = state_of()
    reference = torch.nn.Parameter(state.adapter.params.double())
    optimizer = torch.optim.AdamW([reference], betas=(0.9, 0.95), eps=1e-8, weight_decay=0.05, foreach=False)
    generator = torch.Generator().manual_seed(2)
    norms = set()
    for step in range(50):
        gradient = torch.randn(SIZE, generator=generator) * 10.0 ** (step % 5 - 3)
        rate = 1e-2 * (1 - step / 50)
        state.grad, reference.grad = gradient.clone(), gradient.double()
        torch.nn.utils.clip_grad_norm_([reference], 5.0)
        optimizer.param_groups[0]["lr"] = rate
        metrics = adam_step(
            state, AdamParams(learning_rate=rate, eps=1e-8, weight_decay=0.05, grad_clip_norm=5.0)
        )
        norms.add(metrics["grad_l2:mean"] < metrics["unclipped_grad_l2:mean"])
        optimizer.step()
    assert norms == {True, False}  # some were clipped, some not
    np.testing.assert_allclose(state.adapter.params.numpy(), reference.detach().numpy(), rtol=1e-5, atol=1e-5)


def test_a_long_gradient_is_scaled_to_the_clip_norm_before_anything_else() -> None:
    clipped, scaled = state_of(), state_of()
    [gradient] = gradients(1)
    norm = float(gradient.double().norm())
    clipped.grad, scaled.grad = gradient.clone(), gradient * (3.0 / norm)
    metrics = adam_step(clipped, AdamParams(grad_clip_norm=3.0, eps=1e-3))
    adam_step(scaled, AdamParams(eps=1e-3))
    assert metrics["unclipped_grad_l2:mean"] == pytest.approx(norm, rel=1e-6)
    assert metrics["grad_l2:mean"] == pytest.approx(3.0, rel=1e-6)
    np.testing.assert_allclose(
        clipped.adapter.params.numpy(), scaled.adapter.params.numpy(), rtol=1e-6, atol=1e-8
    )


def test_a_gradient_whose_squares_do_not_fit_32_bits_is_clipped_too() -> None:
    clipped, scaled = state_of(), state_of()
    [gradient] = gradients(1)
    clipped.grad, scaled.grad = gradient * 1e30, gradient * (3.0 / float(gradient.double().norm()))
    metrics = adam_step(clipped, AdamParams(grad_clip_norm=3.0, eps=1e-3))
    adam_step(scaled, AdamParams(eps=1e-3))
    assert metrics["unclipped_grad_l2:mean"] == pytest.approx(
        float((gradient.double() * 1e30).norm()), rel=1e-6
    )
    np.testing.assert_allclose(
        clipped.adapter.params.numpy(), scaled.adapter.params.numpy(), rtol=1e-6, atol=1e-8
    )


def test_a_short_gradient_is_not_clipped() -> None:
    clipped, free = state_of(), state_of()
    [gradient] = gradients(1)
    clipped.grad, free.grad = gradient.clone(), gradient.clone()
    adam_step(clipped, AdamParams(grad_clip_norm=1e6))
    adam_step(free, AdamParams())
    assert torch.equal(clipped.adapter.params, free.adapter.params)


@pytest.mark.slow
def test_a_step_without_gradient_moves_by_the_decaying_moments() -> None:
    state = state_of()
    reference = torch.nn.Parameter(state.adapter.params.double())
    optimizer = torch.optim.AdamW(
        [reference], lr=1e-2, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0, foreach=False
    )
    [gradient] = gradients(1)
    state.grad = gradient.clone()
    for reference_gradient in (gradient.double(), torch.zeros(SIZE, dtype=torch.float64)):
        reference.grad = reference_gradient
        adam_step(state, AdamParams(learning_rate=1e-2))
        optimizer.step()
    np.testing.assert_allclose(state.adapter.params.numpy(), reference.detach().numpy(), rtol=2e-6, atol=2e-7)


def test_the_norm_of_millions_of_values_keeps_its_digits() -> None:
    values = torch.randn(3_000_001, generator=torch.Generator().manual_seed(3)) * 1e-3
    assert l2_norm(values) == pytest.approx(float(values.double().norm()), rel=1e-6)
