"""Entropy and Kullback-Leibler divergence from the logprobs of the targets alone.

Both are sums over the whole vocabulary, of which a server returns only the targets. From these, the regularizers
compute:

* **The partial sum over the targets** (by default). All terms of an entropy are positive, and so are those of KL in
  the form P·ln(P/Q) − P + Q (over the whole vocabulary the two added terms cancel), so the partial sum is a lower
  bound, and a KL is never negative.
* **An estimate of the full sum** (``sampled_by``): if each target was sampled, its term divided by its sampling
  probability is an unbiased estimate of the full sum, and the same holds for the gradient.

Logprobs of shape [T, K] hold K targets per position; their terms are summed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from tinkex.losses.regularizers.positions import (
    Logprobs,
    LogprobsSource,
    Penalty,
    Reduction,
    check_choice,
    check_number,
    check_reduction,
    concatenated,
    fixed_logprobs,
    reduce,
    select_positions,
)
from tinkex.types import Datum

if TYPE_CHECKING:
    import torch

__all__ = ["Entropy", "KLDivergence"]

MAX_LOG_RATIO = 100.0
"""Log ratios are clamped to this, so that a reference with zero probability gives a finite value."""


@dataclass(frozen=True)
class Entropy:
    """The model's entropy, −Σ P·ln P; ``mode="maximize"`` rewards it, ``"minimize"`` penalises it.

    For targets sampled from the model, as in RL, ``sampled_by="model"`` estimates the entropy over the whole
    vocabulary; ``sampled_by="logprobs"`` does so for targets sampled with the logprobs stored under that name in
    ``loss_fn_inputs``. Without it the value is the partial sum over the targets. ``temperature`` and ``normalize``
    (entropy divided by its maximum, ln K) apply to a distribution over the K candidates of a position; with one
    target per position they are rejected.
    ``reduction`` is ``"mean"`` or ``"sum"`` of positions; zeros of the ``loss_fn_input`` named ``where`` mask them out.

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
                "temperature and normalize apply to a distribution over candidates; sampled_by estimates the entropy "
                "over the vocabulary from one sampled target per position. Choose one of the two"
            )

    def __call__(self, data: Sequence[Datum], logprobs: Logprobs) -> Penalty:
        """Returns the penalty on these logprobs, and its metrics."""
        drawn = _sampling_logprobs(self.sampled_by, data, logprobs)
        terms = []
        for lp, log_drawn in concatenated(select_positions(data, self.where, logprobs, drawn)):
            live = self._distribution(lp)
            term = -(live - log_drawn).exp() * live.clamp(min=-MAX_LOG_RATIO)
            term = term.sum(-1) if term.ndim == 2 else term
            terms.append(term / math.log(lp.shape[-1]) if self.normalize else term)
        entropy = reduce(terms, logprobs, self.reduction)
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
    """The KL divergence from a reference; ``direction`` is forward, KL(model‖reference), reverse, or symmetric: the mean of both.

    ``reference`` is the reference's logprobs of the same targets: a name in ``loss_fn_inputs``, one array per
    datum, or a function of the data that returns them. Every term is P·ln(P/Q) − P + Q, never negative.
    Without ``sampled_by`` the value is the partial sum over the targets. With ``sampled_by="model"`` (targets sampled
    from the model) or the name of the stored logprobs they were sampled with, such as the reference's, value and
    gradient are unbiased estimates of the full divergence.
    ``reduction`` is ``"mean"`` or ``"sum"`` of positions; zeros of the ``loss_fn_input`` named ``where`` mask them out.

    >>> KLDivergence("reference_logprobs", direction="reverse").name
    'kl_divergence'
    """

    reference: LogprobsSource
    direction: Literal["forward", "reverse", "symmetric"] = "forward"
    reduction: Reduction = "mean"
    sampled_by: str | None = None
    where: str | None = None
    name: ClassVar[str] = "kl_divergence"

    def __post_init__(self) -> None:
        check_choice("direction", self.direction, ("forward", "reverse", "symmetric"))
        check_reduction(self.reduction)

    def __call__(self, data: Sequence[Datum], logprobs: Logprobs) -> Penalty:
        """Returns the penalty on these logprobs, and its metrics."""
        import torch

        reference = fixed_logprobs(self.reference, data, logprobs, "the reference")
        drawn = _sampling_logprobs(self.sampled_by, data, logprobs)
        terms = []
        for lp, ref, log_drawn in concatenated(
            select_positions(data, self.where, logprobs, reference, drawn)
        ):
            # Both weights are divided by the sampling probability, which is 1 for a partial sum.
            p, q = (lp - log_drawn).exp(), (ref - log_drawn).exp()
            log_ratio = torch.where(lp == ref, lp.new_zeros(()), lp - ref).clamp(
                -MAX_LOG_RATIO, MAX_LOG_RATIO
            )
            forward = p * log_ratio - p + q
            backward = p - q - q * log_ratio
            term = {"forward": forward, "reverse": backward, "symmetric": (forward + backward) / 2}
            picked = term[self.direction]
            terms.append(picked.sum(-1) if picked.ndim == 2 else picked)
        total = reduce(terms, logprobs, self.reduction)
        flat = torch.cat(terms).detach()
        extremes = {"kl_min": float(flat.min()), "kl_max": float(flat.max())} if flat.numel() else {}
        return total, extremes


def _sampling_logprobs(
    sampled_by: str | None, data: Sequence[Datum], logprobs: Logprobs
) -> list[torch.Tensor]:
    """Returns the logprobs with which the targets were sampled; zeros for a partial sum."""
    if sampled_by is None:
        return [lp.detach().new_zeros(lp.shape) for lp in logprobs]
    if any(lp.ndim != 1 for lp in logprobs):
        raise ValueError("sampled_by needs one sampled target per position; this data has several candidates")
    if sampled_by == "model":
        return [lp.detach() for lp in logprobs]
    return fixed_logprobs(sampled_by, data, logprobs, "sampled_by")
