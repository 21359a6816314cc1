"""Direct preference optimization, with an analytic gradient: the client needs no torch.

For a pair with policy log-probabilities π and reference ones ρ (summed over an answer),
z = β[(π_chosen − ρ_chosen) − (π_rejected − ρ_rejected)] and the loss is −log σ(z). Its derivative by every token's
log-probability of the chosen answer is −βσ(−z), of the rejected one +βσ(−z). A server's cross-entropy is
Σ −logprob·weight, so these weights, with the opposite sign, give exactly that gradient. The loss depends only on the
difference, so both answers may become unlikely; to prevent that, ``sft_weight`` adds the chosen answer's cross-entropy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinkex.errors import ConfigError
from tinkex.train.examples import Messages, Preference, read_preferences, split
from tinkex.train.recipes import Metrics, PreparedStep, RunContext
from tinkex.train.rendering import TokenizedExample
from tinkex.train.settings import DpoSettings

if TYPE_CHECKING:
    from tinkex.types import ForwardBackwardOutput

__all__ = ["Dpo", "preference"]

MIN_MARGIN = 1e-3
"""A margin below this is rounding error."""


@dataclass(frozen=True)
class _Pair:
    chosen: TokenizedExample
    rejected: TokenizedExample


def preference(margin: float, beta: float) -> tuple[float, float]:
    """Returns the loss −log σ(βm) of a pair with margin m, and the magnitude of its derivative, βσ(−βm).

    >>> loss, slope = preference(0.0, 0.1)
    >>> round(loss, 4), slope
    (0.6931, 0.05)
    """
    z = beta * margin
    # In this form neither exponential can overflow.
    loss = math.log1p(math.exp(-abs(z))) + max(-z, 0.0)
    decay = math.exp(-abs(z))
    return loss, beta * (decay if z >= 0 else 1.0) / (1.0 + decay)


class Dpo:
    """DPO; the reference is the model that the run starts from: the base model, or the given checkpoint."""

    headline = "loss"

    def __init__(self, settings: DpoSettings, context: RunContext) -> None:
        self._context = context
        self._beta = settings.beta
        self._sft_weight = settings.sft_weight
        learn = read_preferences(settings.data)
        check: list[Preference] = []
        if settings.eval_data is not None:
            check = read_preferences(settings.eval_data)
        else:
            learn, check = split(learn, settings.eval_fraction, settings.seed)
        self._shown = [one.prompt for one in [*check, *learn]]
        self._learn = self._render(learn, settings)
        self._check = self._render(check, settings) if check else []
        if settings.start_from is not None:
            self._reference = context.service.create_sampling_client(model_path=settings.start_from)
        else:
            self._reference = context.service.create_sampling_client(base_model=context.base_model)
        self._references: dict[int, tuple[float, float]] = {}

    @property
    def num_examples(self) -> int:
        """The number of training pairs."""
        return len(self._learn)

    @property
    def prompts(self) -> Sequence[Messages | str]:
        """Prompts of the data, held-out ones first."""
        return self._shown

    def prepare(self, batch: Sequence[int], step: int) -> PreparedStep:
        """Runs a forward pass for the margins and returns the data with the gradient as weights."""
        del step
        pairs = [self._learn[place] for place in batch]
        shifts = self._log_ratios(pairs)
        measured = [preference(chosen - rejected, self._beta) for chosen, rejected in shifts]
        data = []
        for pair, (_, slope) in zip(pairs, measured, strict=True):
            sft = self._sft_weight / pair.chosen.num_learned
            data += [
                pair.chosen.datum((slope + sft) / len(pairs)),
                pair.rejected.datum(-slope / len(pairs)),
            ]
        num_tokens = sum(len(pair.chosen.ids) + len(pair.rejected.ids) for pair in pairs)
        return PreparedStep(data, "cross_entropy", {**_summary(shifts, self._beta), "num_tokens": num_tokens})

    def evaluate(self) -> Metrics | None:
        """Returns the loss and accuracy on held-out pairs."""
        return _summary(self._log_ratios(self._check), self._beta) if self._check else None

    def _log_ratios(self, pairs: Sequence[_Pair]) -> list[tuple[float, float]]:
        """Returns π_chosen − ρ_chosen and π_rejected − ρ_rejected of each pair; their difference is the margin."""
        data = [one.datum() for pair in pairs for one in (pair.chosen, pair.rejected)]
        future = self._context.training.forward(data, "cross_entropy")
        references = self._reference_sums(pairs)
        sums = _answer_sums(future.result(), [one for pair in pairs for one in (pair.chosen, pair.rejected)])
        return [
            (sums[2 * place] - chosen, sums[2 * place + 1] - rejected)
            for place, (chosen, rejected) in enumerate(references)
        ]

    def _reference_sums(self, pairs: Sequence[_Pair]) -> list[tuple[float, float]]:
        """Returns the reference's logprobs of each pair; computed once per pair, since the reference is constant."""
        from tinkex import types

        new = {id(pair): pair for pair in pairs if id(pair) not in self._references}
        futures = {
            key: [
                self._reference.compute_logprobs(types.ModelInput.from_ints(one.ids))
                for one in (pair.chosen, pair.rejected)
            ]
            for key, pair in new.items()
        }
        for key, pair in new.items():
            chosen, rejected = (future.result() for future in futures[key])
            self._references[key] = (_learned_sum(chosen, pair.chosen), _learned_sum(rejected, pair.rejected))
        return [self._references[id(pair)] for pair in pairs]

    def _render(self, examples: Sequence[Preference], settings: DpoSettings) -> list[_Pair]:
        renderer = self._context.renderer
        pairs: list[_Pair] = []
        for one in examples:
            pair = _Pair(renderer.pair(one.prompt, one.chosen), renderer.pair(one.prompt, one.rejected))
            longest = max(len(pair.chosen.ids), len(pair.rejected.ids))
            if longest <= settings.max_length:
                pairs.append(pair)
            elif settings.too_long == "error":
                raise ConfigError(
                    f"{one.where}: {longest} tokens exceed the limit of {settings.max_length}. Raise --max-length, or "
                    "use --too-long skip or cut."
                )
            elif settings.too_long == "cut":
                cut = _Pair(pair.chosen.cut(settings.max_length), pair.rejected.cut(settings.max_length))
                if cut.chosen.num_learned and cut.rejected.num_learned:
                    pairs.append(cut)
        if not pairs:
            raise ConfigError(f"every pair has more than {settings.max_length} tokens; raise --max-length")
        return pairs


def _answer_sums(output: ForwardBackwardOutput, tokens: Sequence[TokenizedExample]) -> list[float]:
    sums = []
    for outputs, one in zip(output.loss_fn_outputs, tokens, strict=True):
        logprobs = outputs["logprobs"].to_numpy()
        learned = one.learned[1:]
        sums.append(float(sum(float(lp) for lp, mine in zip(logprobs, learned, strict=True) if mine)))
    return sums


def _learned_sum(logprobs: Sequence[float | None], tokens: TokenizedExample) -> float:
    return sum(lp for lp, mine in zip(logprobs, tokens.learned, strict=True) if mine and lp is not None)


def _summary(shifts: Sequence[tuple[float, float]], beta: float) -> dict[str, float]:
    margins = [chosen - rejected for chosen, rejected in shifts]
    losses = [preference(margin, beta)[0] for margin in margins]
    return {
        "loss": sum(losses) / len(losses),
        # Before the first step every margin is zero up to rounding, which is not a preference.
        "accuracy": sum(margin > MIN_MARGIN for margin in margins) / len(margins),
        "margin": sum(margins) / len(margins),
        "chosen_shift": sum(chosen for chosen, _ in shifts) / len(shifts),
    }
