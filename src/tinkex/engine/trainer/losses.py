"""The losses: a formula per target token, summed over tokens and datums, in fp32.

Every formula gets one value per target token: ``lp`` is the learner's logprob of the target, ``q`` the caller's
``logprobs``, ``A`` the ``advantages`` and ``r = exp(lp − q)``. Settings such as clip thresholds are per token
too, because a datum can have its own. Gradients with respect to ``lp`` come from autograd.

The inputs and settings of a loss can be read without torch; only the formulas import it.

Shapes: P target tokens (positions × targets per position).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from tinkex.errors import InvalidInput

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "CUSTOM",
    "LOSSES",
    "LOSS_GRADIENT",
    "SEQUENCE_LOG_RATIO",
    "Loss",
    "find_loss",
    "read_settings",
    "sequence_log_ratio",
]

Inputs: TypeAlias = "Mapping[str, Tensor]"
Formula: TypeAlias = "Callable[[Tensor, Inputs], Tensor]"
Floats = npt.NDArray[np.float32]

SEQUENCE_LOG_RATIO = "sequence_log_ratio"
"""An input of sequence-level losses, computed from the logprobs: the same value at every token of a datum."""

LOSS_GRADIENT = "loss_gradient"
"""The input of a custom loss's surrogate: the derivative of the datum's loss by each logprob."""

_CLIP = ("clip_low_threshold", "clip_high_threshold")
_LOSS_ID = "loss_id"
_UNSUPPORTED = {"stable_reinforce": "its formula is not public"}


@dataclass(frozen=True)
class Loss:
    """A loss: its inputs, its settings and its formula.

    ``gate`` names the input that is zero exactly where a token has no gradient; those tokens still get a logprob. ``None``
    means that every token trains. ``clipped`` returns, given log ratios, which tokens are clipped. ``sequence_level``
    losses need the logprobs of a whole datum before the gradient of any token.

    Example:
        >>> LOSSES["ppo"].settings["clip_high_threshold"]
        1.2
    """

    name: str
    output_type: str
    formula: Formula = field(repr=False)
    inputs: tuple[str, ...]
    gate: str | None
    optional_inputs: tuple[str, ...] = ()
    settings: Mapping[str, float] = field(default_factory=dict)
    many_targets: bool = False
    sequence_level: bool = False
    clipped: Formula | None = field(default=None, repr=False)

    def elementwise(self, lp_P: Tensor, inputs: Inputs) -> Tensor:
        """The loss of each target token, differentiable in ``lp_P``."""
        return self.formula(lp_P, inputs)

    def elementwise_and_gradient(self, lp_P: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """The loss of each target token and the derivative of the summed loss by each logprob."""
        import torch

        with torch.enable_grad():
            leaf_P = lp_P.detach().requires_grad_()
            loss_P = self.formula(leaf_P, inputs)
            (gradient_P,) = torch.autograd.grad(loss_P.sum(), leaf_P)
        return loss_P.detach(), gradient_P


def _cross_entropy(lp: Tensor, inputs: Inputs) -> Tensor:
    """−weight·lp."""
    return -inputs["weights"] * lp


def _importance_sampling(lp: Tensor, inputs: Inputs) -> Tensor:
    """−r·A."""
    import torch

    return -torch.exp(_log_ratio(lp, inputs)) * inputs["advantages"]


def _ppo(lp: Tensor, inputs: Inputs) -> Tensor:
    """−min(r·A, clip(r)·A)."""
    return _pessimistic(_log_ratio(lp, inputs), inputs)


def _cispo(lp: Tensor, inputs: Inputs) -> Tensor:
    """−clip(r)·lp·A, with no gradient through clip(r)."""
    import torch

    weight = torch.exp(_log_ratio(lp.detach(), inputs)).clamp(inputs[_CLIP[0]], inputs[_CLIP[1]])
    return -weight * lp * inputs["advantages"]


def _dro(lp: Tensor, inputs: Inputs) -> Tensor:
    """−(lp·A − ½·beta·(lp − q)²)."""
    return -lp * inputs["advantages"] + 0.5 * inputs["beta"] * (lp - inputs["logprobs"]).square()


def _gspo(lp: Tensor, inputs: Inputs) -> Tensor:
    """PPO's form on s, the ratio of the whole sequence; each token's gradient goes through its own lp."""
    return _pessimistic(inputs[SEQUENCE_LOG_RATIO] + (lp - lp.detach()), inputs)


def _log_ratio(lp: Tensor, inputs: Inputs) -> Tensor:
    import torch

    # Where the advantage is 0 the caller's logprob is often a placeholder, and 0 · exp(overflow) would be NaN.
    return torch.where(inputs["advantages"] == 0, 0.0, lp - inputs["logprobs"])


def _pessimistic(log_ratio: Tensor, inputs: Inputs) -> Tensor:
    """−min(r·A, clip(r)·A), finite also where a ratio that is clipped overflows fp32."""
    import torch

    clipped = _takes_clipped_branch(log_ratio.detach(), inputs)
    bound = torch.where(inputs["advantages"] > 0, inputs[_CLIP[1]], inputs[_CLIP[0]])
    free = torch.exp(torch.where(clipped | (inputs["advantages"] == 0), 0.0, log_ratio))
    return -torch.where(clipped, bound, free) * inputs["advantages"]


def _takes_clipped_branch(log_ratio: Tensor, inputs: Inputs) -> Tensor:
    """Where PPO's minimum takes the clipped branch, so that the token has no gradient."""
    import torch

    ratio, advantages = torch.exp(log_ratio), inputs["advantages"]
    above = (ratio > inputs[_CLIP[1]]) & (advantages > 0)
    below = (ratio < inputs[_CLIP[0]]) & (advantages < 0)
    return above | below


def _out_of_bounds(log_ratio: Tensor, inputs: Inputs) -> Tensor:
    """Where the ratio lies outside its thresholds, for any advantage."""
    import torch

    ratio = torch.exp(log_ratio)
    return (ratio > inputs[_CLIP[1]]) | (ratio < inputs[_CLIP[0]])


def sequence_log_ratio(lp_N: Floats, inputs: Mapping[str, Floats]) -> Floats:
    """The mean of lp − q over the tokens that ``sequence_ratio_mask`` marks, repeated for every token.

    A datum with an empty mask has no ratio; its log ratio is 0.

    >>> inputs = {"logprobs": np.zeros(2, np.float32), "sequence_ratio_mask": np.array([1, 0], np.float32)}
    >>> sequence_log_ratio(np.array([-1, -9], np.float32), inputs).tolist()
    [-1.0, -1.0]
    """
    marked = inputs["sequence_ratio_mask"] != 0
    gaps = lp_N[marked].astype(np.float64) - inputs["logprobs"][marked]
    return np.full(lp_N.shape, gaps.mean() if gaps.size else 0.0, dtype=np.float32)


_POLICY_INPUTS = ("logprobs", "advantages")

LOSSES: Mapping[str, Loss] = MappingProxyType(
    {
        loss.name: loss
        for loss in (
            Loss(
                name="cross_entropy",
                output_type="CrossEntropyLossReturn",
                formula=_cross_entropy,
                inputs=(),
                optional_inputs=("weights",),
                gate="weights",
                many_targets=True,
            ),
            Loss(
                name="importance_sampling",
                output_type="ImportanceSamplingLossReturn",
                formula=_importance_sampling,
                inputs=_POLICY_INPUTS,
                gate="advantages",
            ),
            Loss(
                name="ppo",
                output_type="PpoLossReturn",
                formula=_ppo,
                inputs=_POLICY_INPUTS,
                optional_inputs=_CLIP,
                settings=MappingProxyType({_CLIP[0]: 0.8, _CLIP[1]: 1.2}),
                gate="advantages",
                clipped=_takes_clipped_branch,
            ),
            Loss(
                name="cispo",
                output_type="CispoLossReturn",
                formula=_cispo,
                inputs=_POLICY_INPUTS,
                optional_inputs=_CLIP,
                settings=MappingProxyType({_CLIP[0]: 0.0, _CLIP[1]: 4.0}),
                gate="advantages",
                clipped=_out_of_bounds,
            ),
            Loss(
                name="dro",
                output_type="DroLossReturn",
                formula=_dro,
                inputs=_POLICY_INPUTS,
                settings=MappingProxyType({"beta": 0.05}),
                gate=None,
            ),
            Loss(
                name="gspo",
                output_type="GspoLossReturn",
                formula=_gspo,
                inputs=(*_POLICY_INPUTS, "sequence_ratio_mask"),
                optional_inputs=_CLIP,
                settings=MappingProxyType({_CLIP[0]: 0.8, _CLIP[1]: 1.2}),
                gate="advantages",
                sequence_level=True,
                clipped=_takes_clipped_branch,
            ),
        )
    }
)


def _surrogate(lp: Tensor, inputs: Inputs) -> Tensor:
    """gradient·lp, which has the gradient of a custom loss, though not its value."""
    return inputs[LOSS_GRADIENT] * lp


CUSTOM = Loss(
    name="custom",
    output_type="CustomLossReturn",
    formula=_surrogate,
    inputs=(),
    gate=LOSS_GRADIENT,
    many_targets=True,
    sequence_level=True,
)
"""A custom loss, computed by a graph; see ``loss_graph``."""


def find_loss(name: str) -> Loss:
    """The loss with this name; raises ``InvalidInput``, which lists the supported ones, if there is none.

    >>> find_loss("dro").settings["beta"]
    0.05
    """
    known = ", ".join((*LOSSES, CUSTOM.name))
    if name in _UNSUPPORTED:
        raise InvalidInput(f"loss_fn {name!r} is not supported: {_UNSUPPORTED[name]}; supported are {known}")
    if name == CUSTOM.name:
        return CUSTOM
    if name not in LOSSES:
        raise InvalidInput(f"loss_fn {name!r} does not exist; supported are {known}")
    return LOSSES[name]


def read_settings(loss: Loss, config: Mapping[str, float | str] | None) -> dict[str, float]:
    """The loss's settings with the caller's ``loss_fn_config`` in place of the defaults.

    >>> read_settings(LOSSES["ppo"], {"clip_low_threshold": 0.9})
    {'clip_low_threshold': 0.9, 'clip_high_threshold': 1.2}
    """
    settings = dict(loss.settings)
    for name, value in (config or {}).items():
        if loss is CUSTOM and name == _LOSS_ID and isinstance(value, str):
            continue  # the caller has resolved it to a graph
        if name not in settings:
            known = ", ".join(settings) or (_LOSS_ID if loss is CUSTOM else "none")
            raise InvalidInput(
                f"loss_fn_config has {name!r}, which {loss.name} does not read; its settings: {known}. Remove it"
            )
        if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
            raise InvalidInput(f"loss_fn_config[{name!r}] must be a finite number, and is {value!r}")
        settings[name] = float(value)
    if loss.settings.keys() >= set(_CLIP) and settings[_CLIP[0]] > settings[_CLIP[1]]:
        raise InvalidInput(
            f"loss_fn_config: {_CLIP[0]} {settings[_CLIP[0]]} is above {_CLIP[1]} {settings[_CLIP[1]]}; "
            "they bound the ratio exp(lp − logprobs) from below and above"
        )
    if settings.get("beta", 0.0) < 0:
        raise InvalidInput(f"loss_fn_config['beta'] must be ≥ 0, and is {settings['beta']}")
    return settings
