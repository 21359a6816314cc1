"""When a step is rejected, and what it leaves alone."""

from __future__ import annotations

import msgspec
import pytest
import torch

from tinkex.engine.model.lora import Adapter, LoraLayout, LoraSpec
from tinkex.engine.trainer.optim import adam_step, all_finite, check_adam, l2_norm
from tinkex.engine.trainer.state import TrainState
from tinkex.errors import InvalidInput, NumericalError
from tinkex.types.training import AdamParams


def state_of(*params: float) -> TrainState:
    return TrainState(
        Adapter(
            LoraSpec(rank=1, seed=0),
            LoraLayout(1, (), len(params)),
            torch.tensor(params, dtype=torch.float32),
        )
    )


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
def test_a_gradient_that_cannot_be_used_is_discarded_and_changes_nothing(poison: float) -> None:
    state = state_of(1.0, 2.0)
    state.grad = torch.tensor([0.5, -0.5])
    adam_step(state, AdamParams())
    before = (
        state.adapter.params.clone(),
        *(m.clone() for m in (state.exp_avg, state.exp_avg_sq) if m is not None),
    )
    state.grad = torch.tensor([1.0, poison])
    with pytest.raises(NumericalError, match="discarded"):
        adam_step(state, AdamParams())
    assert state.grad is None
    assert state.step == 1
    assert state.exp_avg is not None
    assert state.exp_avg_sq is not None
    for now, then in zip((state.adapter.params, state.exp_avg, state.exp_avg_sq), before, strict=True):
        assert torch.equal(now, then)


def test_a_step_uses_up_the_gradient_and_counts() -> None:
    state = state_of(1.0)
    state.grad = torch.tensor([3.0])
    metrics = adam_step(state, AdamParams(learning_rate=0.5))
    assert state.grad is None
    assert state.adapter.params.item() == pytest.approx(0.5)
    assert metrics == {
        "unclipped_grad_l2:mean": 3.0,
        "grad_l2:mean": 3.0,
        "learning_rate:mean": 0.5,
        "step:unique": 1.0,
    }


def test_a_first_step_without_gradient_only_decays_weights() -> None:
    state = state_of(2.0)
    metrics = adam_step(state, AdamParams(learning_rate=0.1, weight_decay=0.5))
    assert state.adapter.params.item() == pytest.approx(1.9)
    assert state.step == 1
    assert metrics["unclipped_grad_l2:mean"] == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("learning_rate", -1.0),
        ("learning_rate", float("inf")),
        ("beta1", 1.0),
        ("beta2", float("nan")),
        ("eps", 0.0),
        ("weight_decay", -0.1),
        ("grad_clip_norm", float("nan")),
    ],
)
def test_a_setting_no_step_can_be_taken_with_is_named(field: str, value: float) -> None:
    params = AdamParams()
    msgspec.structs.force_setattr(params, field, value)  # what the type itself rejects to hold
    with pytest.raises(InvalidInput, match=field):
        check_adam(params)


def test_finiteness_and_norm_of_small_and_odd_sizes() -> None:
    assert all_finite(torch.zeros(3))
    assert not all_finite(torch.tensor([0.0, float("-inf")]))
    assert l2_norm(torch.ones(4097)) == pytest.approx(4097**0.5)
    assert l2_norm(torch.tensor([3.0, 4.0])) == 5.0
