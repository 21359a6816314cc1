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
from tinkex.train.data import TrainingData
from tinkex.train.examples import Messages, Preference
from tinkex.train.recipes import Metrics, PreparedStep, RunContext, collect
from tinkex.train.rendering import Renderer, TokenizedExample
from tinkex.train.settings import DpoSettings

if TYPE_CHECKING:
    from tinkex.types import Datum, ForwardBackwardOutput

__all__ = ["Dpo", "preference"]

MIN_MARGIN = 1e-3
"""A margin below this is rounding error."""


@dataclass(frozen=True)
class _Pair:
    chosen: TokenizedExample
    rejected: TokenizedExample

    @property
    def answers(self) -> tuple[TokenizedExample, TokenizedExample]:
        return self.chosen, self.rejected


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

    def __init__(self, settings: DpoSettings, data: TrainingData[Preference], renderer: Renderer) -> None:
        self._beta = settings.beta
        self._sft_weight = settings.sft_weight
        self.prompts: Sequence[Messages | str] = [one.prompt for one in [*data.held_out, *data.examples]]
        self._learn = _render(renderer, data.examples, settings)
        self._check = _render(renderer, data.held_out, settings) if data.held_out else []
        self._references: dict[int, tuple[float, float]] = {}

    @property
    def token_counts(self) -> Sequence[int]:
        """The number of tokens of each training pair."""
        return [sum(len(one.ids) for one in pair.answers) for pair in self._learn]

    def sequences(self, place: int) -> Sequence[Sequence[int]]:
        """The tokens of both answers of a pair, each after its prompt, without the last one, which is only predicted."""
        return [one.ids[:-1] for one in self._learn[place].answers]

    def prepare(self, context: RunContext, batches: Sequence[Sequence[int]], step: int) -> PreparedStep:
        """Runs forward passes for the margins and returns the data with the gradient as weights."""
        del step
        chosen = [[self._learn[place] for place in batch] for batch in batches]
        pairs = [pair for batch in chosen for pair in batch]
        shifts = self._log_ratios(context, chosen)
        slopes = iter(preference(good - bad, self._beta)[1] for good, bad in shifts)
        passes = [
            [datum for pair in batch for datum in self._data(pair, next(slopes), len(pairs))]
            for batch in chosen
        ]
        num_tokens = sum(len(one.ids) for pair in pairs for one in pair.answers)
        return PreparedStep(
            passes, "cross_entropy", {**_summary(shifts, self._beta), "num_tokens": num_tokens}
        )

    def _data(self, pair: _Pair, slope: float, num_pairs: int) -> list[Datum]:
        sft = self._sft_weight / pair.chosen.num_learned
        return [
            pair.chosen.datum((slope + sft) / num_pairs),
            pair.rejected.datum(-slope / num_pairs),
        ]

    def evaluate(self, context: RunContext) -> Metrics | None:
        """Returns the loss and accuracy on held-out pairs."""
        if not self._check:
            return None
        context.progress("evaluating", 0, 1)
        return _summary(self._log_ratios(context, [self._check]), self._beta)

    def _log_ratios(
        self, context: RunContext, batches: Sequence[Sequence[_Pair]]
    ) -> list[tuple[float, float]]:
        """Returns π_chosen − ρ_chosen and π_rejected − ρ_rejected of each pair; their difference is the margin."""
        answers = [[one for pair in batch for one in pair.answers] for batch in batches]
        futures = [
            context.training.forward([one.datum() for one in batch], "cross_entropy") for batch in answers
        ]
        references = self._reference_sums(context, [pair for batch in batches for pair in batch])
        sums = [
            total
            for future, batch in zip(futures, answers, strict=True)
            for total in _answer_sums(future.result(), batch)
        ]
        return [
            (sums[2 * place] - chosen, sums[2 * place + 1] - rejected)
            for place, (chosen, rejected) in enumerate(references)
        ]

    def _reference_sums(self, context: RunContext, pairs: Sequence[_Pair]) -> list[tuple[float, float]]:
        """Returns the reference's logprobs of each pair; computed once per pair, since the reference is constant."""
        from tinkex import types

        new = {id(pair): pair for pair in pairs if id(pair) not in self._references}
        if new:
            answers = [one for pair in new.values() for one in pair.answers]
            futures = [
                context.initial.compute_logprobs(types.ModelInput.from_ints(one.ids)) for one in answers
            ]
            logprobs = collect(futures, "logprobs of the reference model", context.progress)
            sums = [_learned_sum(found, one) for found, one in zip(logprobs, answers, strict=True)]
            self._references |= dict(zip(new, zip(sums[::2], sums[1::2], strict=True), strict=True))
        return [self._references[id(pair)] for pair in pairs]


def _render(renderer: Renderer, examples: Sequence[Preference], settings: DpoSettings) -> list[_Pair]:
    pairs: list[_Pair] = []
    for one in examples:
        pair = _Pair(
            renderer.pair(one.prompt, one.chosen, one.tools),
            renderer.pair(one.prompt, one.rejected, one.tools),
        )
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
