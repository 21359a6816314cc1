"""Penalties on the size of logprobs or probabilities: L1, L2, and their mixture.

They apply to the model's logprobs of the targets, or to a ``loss_fn_input`` (``field``). To keep the *weights* of the
adapter small, use ``AdamParams(weight_decay=…)``, which the optimizer applies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from tinkex.losses.regularizers.positions import (
    Logprobs,
    Penalty,
    Reduction,
    check_choice,
    check_number,
    check_reduction,
    concatenated,
    fixed_logprobs,
    reduce,
    select_positions,
    zero,
)
from tinkex.types import Datum

if TYPE_CHECKING:
    import torch

__all__ = ["L1", "L2", "ElasticNet", "Of"]

Of = Literal["logprobs", "probs"]
"""What a norm is taken of: the logprobs themselves, or the probabilities."""


@dataclass(frozen=True)
class L1:
    """The sum or mean of absolute values: Σ|x|.

    ``of`` is ``"logprobs"`` or ``"probs"``; ``reduction`` is ``"sum"`` or ``"mean"``. Of ``logprobs``, which are never
    positive, it is the negative log-likelihood of the targets. Of ``probs`` it is their total probability: minimising it
    makes the targets less likely. ``where`` names a ``loss_fn_input`` (such as ``"weights"``) whose zeros mask positions
    out. ``field`` names a ``loss_fn_input`` to take the norm of instead, in every datum: it is constant, so it counts in the loss and has no gradient.

    >>> L1(of="probs", reduction="mean").name
    'l1'
    """

    of: Of = "logprobs"
    reduction: Reduction = "sum"
    where: str | None = None
    field: str | None = None
    name: ClassVar[str] = "l1"

    def __post_init__(self) -> None:
        _check_target(self.of, self.field)
        check_reduction(self.reduction)

    def __call__(self, data: Sequence[Datum], logprobs: Logprobs) -> Penalty:
        """Returns the penalty on these logprobs, and its metrics."""
        values = _values(data, logprobs, self.of, self.where, self.field)
        sizes = [x.abs() for x in values]
        return reduce(sizes, logprobs, self.reduction), _sum_and_mean(self.name, sizes)


@dataclass(frozen=True)
class L2:
    """The sum or mean of squares: Σ clip(x − center)².

    ``center`` is a number, or ``"mean"`` for the mean of all positions (the penalty is then their variance, and its
    gradient includes that of the mean). ``clip`` bounds each difference before it is squared, so that positions
    beyond it have no gradient. ``of``, ``reduction``, ``where`` and ``field`` are those of :class:`L1`.

    >>> L2(center="mean", clip=5.0).name
    'l2'
    """

    of: Of = "logprobs"
    reduction: Reduction = "sum"
    center: float | Literal["mean"] = 0.0
    clip: float | None = None
    where: str | None = None
    field: str | None = None
    name: ClassVar[str] = "l2"

    def __post_init__(self) -> None:
        _check_target(self.of, self.field)
        check_reduction(self.reduction)
        if isinstance(self.center, str):
            check_choice("center", self.center, ("mean",))
        else:
            check_number("center", self.center)
        if self.clip is not None:
            check_number("clip", self.clip, above=0.0)

    def __call__(self, data: Sequence[Datum], logprobs: Logprobs) -> Penalty:
        """Returns the penalty on these logprobs, and its metrics."""
        import torch

        values = _values(data, logprobs, self.of, self.where, self.field)
        flat = torch.cat([x.reshape(-1) for x in values])
        if not flat.numel():
            return zero(logprobs), {}
        center = flat.mean() if self.center == "mean" else flat.new_tensor(self.center)
        off = flat - center
        if self.clip is not None:
            off = off.clamp(-self.clip, self.clip)
        metrics = _sum_and_mean(self.name, [flat.square()])
        return reduce([off.square()], logprobs, self.reduction), {"center": float(center.detach()), **metrics}


@dataclass(frozen=True)
class ElasticNet:
    """A mixture: ``l1_ratio``·L1 + (1 − ``l1_ratio``)·L2, the L2 part around zero.

    ``of``, ``reduction``, ``where`` and ``field`` are those of :class:`L1`.

    >>> ElasticNet(l1_ratio=0.9).name
    'elastic_net'
    """

    l1_ratio: float = 0.5
    of: Of = "logprobs"
    reduction: Reduction = "sum"
    where: str | None = None
    field: str | None = None
    name: ClassVar[str] = "elastic_net"

    def __post_init__(self) -> None:
        _check_target(self.of, self.field)
        check_reduction(self.reduction)
        check_number("l1_ratio", self.l1_ratio)
        if not 0 <= self.l1_ratio <= 1:
            raise ValueError(f"l1_ratio must be between 0 (all L2) and 1 (all L1), got {self.l1_ratio!r}")

    def __call__(self, data: Sequence[Datum], logprobs: Logprobs) -> Penalty:
        """Returns the penalty on these logprobs, and its metrics."""
        values = _values(data, logprobs, self.of, self.where, self.field)
        mixed = [self.l1_ratio * x.abs() + (1 - self.l1_ratio) * x.square() for x in values]
        return reduce(mixed, logprobs, self.reduction), {"l1_ratio": self.l1_ratio}


def _sum_and_mean(name: str, sizes: Sequence[torch.Tensor]) -> dict[str, float]:
    """The metrics ``<name>_raw`` and ``<name>_mean``: the sum and the mean, whatever the reduction."""
    import torch

    flat = torch.cat([size.detach().reshape(-1) for size in sizes])
    return {f"{name}_raw": float(flat.sum()), f"{name}_mean": float(flat.mean())} if flat.numel() else {}


def _check_target(of: Of, field: str | None) -> None:
    check_choice("of", of, ("logprobs", "probs"))
    if field is not None and of != "logprobs":
        raise ValueError(
            f"field={field!r} replaces the model's probabilities; give 'field' or of='probs', not both"
        )


def _values(
    data: Sequence[Datum], logprobs: Logprobs, of: Of, where: str | None, field: str | None
) -> list[torch.Tensor]:
    if field is not None:
        # Shapes must be those of the logprobs, so that `where` and the reductions mean the same.
        fixed = fixed_logprobs(field, data, logprobs, field)
        kept = select_positions(data, where, logprobs, fixed)
        return [value + 0 * lp for lp, value in concatenated(kept)]  # a gradient of zeros
    kept_logprobs = [lp for (lp,) in concatenated(select_positions(data, where, logprobs))]
    return [lp.exp() for lp in kept_logprobs] if of == "probs" else kept_logprobs
