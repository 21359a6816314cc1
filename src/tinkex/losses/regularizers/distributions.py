"""Entropy and Kullback-Leibler divergence from the logprobs of the targets alone.

Both are sums over the whole vocabulary, of which a server returns the targets only. What can be said from
these, and what each regularizer here computes:

* **The targets' share** (by default): the terms of the sum that belong to the targets. All terms of an entropy
  are positive, and so are those of KL in the form P·ln(P/Q) − P + Q (over a whole vocabulary the two additions
  cancel), so a share is a lower bound of the whole, and a KL is never negative.
* **An estimate of the whole** (``sampled_by``): where each target was drawn at random, its term divided by the
  probability it was drawn with has the whole sum as its mean, and the same holds for the gradient.

Logprobs of shape [T, K] hold K targets of every position; their terms are added up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from tinkex.losses.regularizers.positions import (
    Logprobs,
    Penalty,
    Reduction,
    Source,
    aligned,
    check_choice,
    check_number,
    check_reduction,
    chosen_with,
    reduced,
    together,
)
from tinkex.types import Datum

if TYPE_CHECKING:
    import torch

__all__ = ["Entropy", "KLDivergence"]

WIDEST = 100.0
"""Differences of logprobs beyond this count as this: a reference that rules a token out stays finite."""


@dataclass(frozen=True)
class Entropy:
    """How undecided the model is: −Σ P·ln P; ``mode="maximize"`` rewards it, ``"minimize"`` penalises it.

    For targets the model sampled itself, as in RL, ``sampled_by="model"`` estimates the entropy of the whole
    vocabulary; ``sampled_by="logprobs"`` does so for targets drawn with the logprobs stored under that name in
    ``loss_fn_inputs``. Without it the value is the targets' share. ``temperature`` and ``normalize`` (entropy
    over its largest possible value, ln K) speak of a distribution over the K candidates of a position; with one
    target per position there is none, and they are refused.

    >>> Entropy(mode="maximize", sampled_by="model").name
    'entropy'
    """

    mode: Literal["minimize", "maximize"] = "minimize"
    reduction: Reduction = "mean"
    sampled_by: str | None = None
    temperature: float = 1.0
    normalize: bool = False
    where: str | None = None
    name: ClassVar[str] = "entropy"

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, ("minimize", "maximize"))
        check_reduction(self.reduction)
        check_number("temperature", self.temperature, above=0.0)
        if self.sampled_by is not None and (self.temperature != 1 or self.normalize):
            raise ValueError(
                "temperature and normalize change a distribution over candidates; sampled_by estimates the entropy "
                "of the vocabulary from one drawn target per position. Choose one of the two"
            )

    def __call__(self, data: Sequence[Datum], logprobs: Logprobs) -> Penalty:
        """The penalty on these logprobs, and its metrics."""
        drawn = _drawn(self.sampled_by, data, logprobs)
        terms = []
        for lp, log_drawn in together(chosen_with(data, self.where, logprobs, drawn)):
            live = self._distribution(lp)
            term = -(live - log_drawn).exp() * live.clamp(min=-WIDEST)
            term = term.sum(-1) if term.ndim == 2 else term
            terms.append(term / math.log(lp.shape[-1]) if self.normalize else term)
        entropy = reduced(terms, logprobs, self.reduction)
        signed = entropy if self.mode == "minimize" else -entropy
        return signed, {"entropy": float(entropy.detach())}

    def _distribution(self, lp: torch.Tensor) -> torch.Tensor:
        if self.temperature == 1 and not self.normalize:
            return lp
        if lp.ndim != 2 or lp.shape[-1] < 2:
            raise ValueError(
                "temperature and normalize need the logprobs of several candidates per position (target_tokens of "
                f"shape [T, K]); these have the shape {tuple(lp.shape)}. Use sampled_by='model' for sampled targets"
            )
        return lp if self.temperature == 1 else (lp / self.temperature).log_softmax(-1)


@dataclass(frozen=True)
class KLDivergence:
    """How far the model is from a reference: forward KL(model‖reference), reverse, or the mean of both.

    ``reference`` is the reference's logprobs of the same targets: a name in ``loss_fn_inputs``, one array per
    datum, or a function of the data that returns them. Every term is P·ln(P/Q) − P + Q, never negative.
    Without ``sampled_by`` the value is the targets' share of the divergence. With ``sampled_by="model"``
    (targets the model drew itself) or the name of stored logprobs they were drawn with, such as the
    reference's own, value and gradient are unbiased estimates of the whole divergence.

    >>> KLDivergence("reference_logprobs", direction="reverse").name
    'kl_divergence'
    """

    reference: Source
    direction: Literal["forward", "reverse", "symmetric"] = "forward"
    reduction: Reduction = "mean"
    sampled_by: str | None = None
    where: str | None = None
    name: ClassVar[str] = "kl_divergence"

    def __post_init__(self) -> None:
        check_choice("direction", self.direction, ("forward", "reverse", "symmetric"))
        check_reduction(self.reduction)

    def __call__(self, data: Sequence[Datum], logprobs: Logprobs) -> Penalty:
        """The penalty on these logprobs, and its metrics."""
        import torch

        reference = aligned(self.reference, data, logprobs, "the reference")
        drawn = _drawn(self.sampled_by, data, logprobs)
        terms = []
        for lp, ref, log_drawn in together(chosen_with(data, self.where, logprobs, reference, drawn)):
            # Both weights are over the drawing probability, which is 1 where a share is meant.
            p, q = (lp - log_drawn).exp(), (ref - log_drawn).exp()
            log_ratio = torch.where(lp == ref, lp.new_zeros(()), lp - ref).clamp(-WIDEST, WIDEST)
            forward = p * log_ratio - p + q
            backward = p - q - q * log_ratio
            term = {"forward": forward, "reverse": backward, "symmetric": (forward + backward) / 2}
            picked = term[self.direction]
            terms.append(picked.sum(-1) if picked.ndim == 2 else picked)
        total = reduced(terms, logprobs, self.reduction)
        flat = torch.cat(terms).detach()
        extremes = {"kl_min": float(flat.min()), "kl_max": float(flat.max())} if flat.numel() else {}
        return total, extremes


def _drawn(sampled_by: str | None, data: Sequence[Datum], logprobs: Logprobs) -> list[torch.Tensor]:
    """The logprobs with which the targets were drawn; zeros where all given targets are meant."""
    if sampled_by is None:
        return [lp.detach().new_zeros(lp.shape) for lp in logprobs]
    if any(lp.ndim != 1 for lp in logprobs):
        raise ValueError("sampled_by is for one drawn target per position; this data has several candidates")
    if sampled_by == "model":
        return [lp.detach() for lp in logprobs]
    return aligned(sampled_by, data, logprobs, "sampled_by")
