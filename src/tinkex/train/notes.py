"""Diagnostics of a run's metrics and samples: signs of overfitting, or of no learning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["notes"]

MIN_REGRESSION = 0.1
"""Relative distance from the best evaluation that is more than noise."""
MIN_WORDS = 12
"""Shorter answers are not checked for repetition."""


MIN_HELD_OUT = {"loss": 2, "reward": 8}
"""Fewer held-out examples say nothing about the trend of that metric."""


def notes(
    headline: str,
    metrics: Sequence[Mapping[str, Any]],
    samples: Sequence[Mapping[str, str]],
    num_held_out: int,
) -> list[str]:
    """Returns warnings for the report, each with advice; none if there is no problem.

    >>> lines = [{"step": 4, "eval_loss": 1.0}, {"step": 8, "eval_loss": 2.0}]
    >>> notes("loss", lines, [], num_held_out=9)[0][:45]
    'The eval loss was best after step 4 (1.000) a'
    """
    enough = num_held_out >= MIN_HELD_OUT[headline]
    found = [
        _past_its_best(headline, metrics) if enough else None,
        _chosen_lost(metrics),
        _nothing_to_learn(metrics),
    ]
    return [note for note in [*found, _repeats(samples)] if note is not None]


def _past_its_best(headline: str, metrics: Sequence[Mapping[str, Any]]) -> str | None:
    name = f"eval_{headline}"
    tried = [(int(line["step"]), float(line[name])) for line in metrics if name in line]
    if len(tried) < 2:
        return None
    sign = 1.0 if headline == "reward" else -1.0
    step, best = max(tried, key=lambda one: sign * one[1])
    last = tried[-1][1]
    if sign * (best - last) <= MIN_REGRESSION * max(abs(best), MIN_REGRESSION):
        return None
    if step == 0:
        return (
            f"The eval {headline} was better before training ({best:.3f}) than after it ({last:.3f}): use more data, or a "
            "lower --learning-rate."
        )
    return (
        f"The eval {headline} was best after step {step} ({best:.3f}) and is {last:.3f} at the end: train for fewer "
        f"steps (--steps {step}), keep the best checkpoint (--keep-best), or lower --learning-rate."
    )


def _chosen_lost(metrics: Sequence[Mapping[str, Any]]) -> str | None:
    shifts = [float(line["chosen_shift"]) for line in metrics if "chosen_shift" in line]
    if not shifts or shifts[-1] > -1.0:
        return None
    return (
        f"The chosen answers have become less likely too (by {-shifts[-1]:.1f} nats): the model may produce neither of "
        "the two. Raise --sft-weight or --beta, or lower --learning-rate."
    )


def _nothing_to_learn(metrics: Sequence[Mapping[str, Any]]) -> str | None:
    used = [float(line["used_answers"]) for line in metrics if "used_answers" in line]
    if not used or max(used) > 0:
        return None
    return (
        "All answers to a prompt always had the same reward, so nothing was learned: choose a reward that differs "
        "between answers, or raise --group-size."
    )


def _repeats(samples: Sequence[Mapping[str, str]]) -> str | None:
    worse = [one for one in samples if _is_loop(one["after"]) and not _is_loop(one["before"])]
    if not worse:
        return None
    return "After training an answer repeats itself, unlike before: lower --learning-rate, or train for fewer steps."


def _is_loop(text: str) -> bool:
    """Returns whether most of a text is repetition.

    >>> _is_loop("the cat sat on the mat " * 4), _is_loop("a fine short answer")
    (True, False)
    """
    words = text.split()
    if len(words) < MIN_WORDS:
        return False
    triples = list(zip(words, words[1:], words[2:], strict=False))
    return len(set(triples)) < len(triples) / 2
