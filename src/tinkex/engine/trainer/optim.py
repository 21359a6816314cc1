"""AdamW on flat buffers, with settings per step."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from tinkex.engine.trainer.state import TrainState
from tinkex.errors import InvalidInput, NumericalError
from tinkex.types.training import AdamParams

__all__ = ["adam_step", "all_finite", "check_adam", "l2_norm"]

_BLOCK = 4096
# Adam squares the gradient: beyond this an fp32 second moment overflows, and its parameter never changes again.
_MAX_GRADIENT = math.sqrt(torch.finfo(torch.float32).max)


def adam_step(state: TrainState, params: AdamParams) -> dict[str, float]:
    """Applies and clears the accumulated gradient; returns metrics such as the norm before clipping.

    The update is ``p ← p·(1 − lr·decay) − lr·m̂ / (√v̂ + eps)`` with bias-corrected moments. If
    ``grad_clip_norm`` is above 0, a gradient with a larger global norm is scaled down to it first. Without an
    accumulated gradient the step uses a gradient of zeros: moments decay, weights follow them, and the count increases. A
    gradient that is not finite is discarded with a ``NumericalError``; weights, moments and count do not change.

    Example:
        >>> adam_step(state, AdamParams(learning_rate=1e-3, grad_clip_norm=1.0))["step:unique"]
        1.0
    """
    check_adam(params)
    weights = state.adapter.params
    gradient = torch.zeros_like(weights) if state.grad is None else state.grad
    norm = l2_norm(gradient)
    clip = params.grad_clip_norm
    scale = clip / norm if 0 < clip < norm else 1.0
    if not math.isfinite(norm) or norm * scale > _MAX_GRADIENT:
        state.grad = None
        raise NumericalError(
            f"the accumulated gradient has norm {norm:g}, which AdamW cannot use in fp32; it was discarded, and weights and "
            "moments are unchanged. Look for extreme weights, advantages or logprobs in the data since the last step, "
            "or set grad_clip_norm"
        )
    if scale != 1.0:
        gradient.mul_(scale)
    if state.shared:
        state.adapter = state.adapter.with_params(weights.clone())
        state.shared = False
    if state.exp_avg is None or state.exp_avg_sq is None:
        state.exp_avg, state.exp_avg_sq = torch.zeros_like(weights), torch.zeros_like(weights)
    with torch.no_grad():
        adamw(
            [state.adapter.params],
            [gradient],
            [state.exp_avg],
            [state.exp_avg_sq],
            [],
            # torch's step counter: it is raised before use, and read as a float
            [torch.tensor(float(state.step))],
            fused=True,
            amsgrad=False,
            beta1=params.beta1,
            beta2=params.beta2,
            lr=params.learning_rate,
            weight_decay=params.weight_decay,
            eps=params.eps,
            maximize=False,
        )
    state.step += 1
    state.grad = None
    return {
        "unclipped_grad_l2:mean": norm,
        "grad_l2:mean": norm * scale,
        "learning_rate:mean": params.learning_rate,
        "step:unique": float(state.step),
    }


def check_adam(params: AdamParams) -> None:
    """Raises ``InvalidInput``, which names the field, for settings that are not valid."""
    for name in ("learning_rate", "weight_decay", "grad_clip_norm"):
        value = getattr(params, name)
        if not (math.isfinite(value) and value >= 0):
            raise InvalidInput(f"adam_params.{name} must be a finite number ≥ 0, and is {value}")
    for name in ("beta1", "beta2"):
        value = getattr(params, name)
        if not 0 <= value < 1:
            raise InvalidInput(f"adam_params.{name} must lie in [0, 1), and is {value}")
    if not (math.isfinite(params.eps) and params.eps > 0):
        raise InvalidInput(f"adam_params.eps must be a finite number > 0, and is {params.eps}")


def l2_norm(flat: Tensor) -> float:
    """The Euclidean norm, exact to fp32 rounding: blocks in fp32, their sum in fp64.

    One long fp32 sum loses up to three digits over ten million values. If squares overflow fp32, the whole sum is in
    fp64, so that a large gradient can still be clipped.

    >>> l2_norm(torch.full((10_000,), 0.5))
    50.0
    """
    whole = flat.numel() // _BLOCK * _BLOCK
    blocks = torch.linalg.vector_norm(flat[:whole].view(-1, _BLOCK), dim=1).double()
    rest = torch.linalg.vector_norm(flat[whole:].double())
    norm = math.hypot(float(torch.linalg.vector_norm(blocks)), float(rest))
    return float(torch.linalg.vector_norm(flat, dtype=torch.float64)) if math.isinf(norm) else norm


def all_finite(flat: Tensor) -> bool:
    """Whether no value is NaN or infinite, in one pass over memory.

    >>> all_finite(torch.tensor([1.0, float("nan")]))
    False
    """
    low, high = torch.aminmax(flat)
    return math.isfinite(float(low)) and math.isfinite(float(high))
