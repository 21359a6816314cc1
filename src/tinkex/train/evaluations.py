"""The evaluations of a run so far: the best one, and whether to stop early."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

__all__ = ["Evaluations"]


@dataclass(frozen=True)
class Evaluations:
    """The evaluations after training steps, in order, each with its step; the one before training does not count.

    >>> found = Evaluations.of("loss", [{"step": 4, "eval_loss": 1.0}, {"step": 8, "eval_loss": 2.0}])
    >>> found.best, found.should_stop(1), found.should_stop(2)
    ((4, 1.0), True, False)
    """

    headline: str
    values: Sequence[tuple[int, float]]

    @classmethod
    def of(cls, headline: str, metrics: Sequence[Mapping[str, Any]]) -> Self:
        """Reads the evaluations from the metrics of a run."""
        name = f"eval_{headline}"
        return cls(
            headline,
            [(int(line["step"]), float(line[name])) for line in metrics if name in line and line["step"]],
        )

    @property
    def steps(self) -> set[int]:
        """The steps after which there was an evaluation."""
        return {step for step, _ in self.values}

    @property
    def best(self) -> tuple[int, float] | None:
        """The first of the best evaluations: the highest reward, or the lowest loss."""
        sign = 1.0 if self.headline == "reward" else -1.0
        return max(self.values, key=lambda one: sign * one[1], default=None)

    def should_stop(self, patience: int | None) -> bool:
        """Returns whether the last ``patience`` evaluations are no better than the best one before them."""
        if patience is None or self.best is None:
            return False
        return sum(step > self.best[0] for step, _ in self.values) >= patience
