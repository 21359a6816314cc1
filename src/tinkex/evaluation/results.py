"""What an evaluation found: a score for each item, and means with intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tinkex.evaluation.statistics import Interval, bootstrap_interval, score_interval

__all__ = ["ItemResult", "Score", "TaskResult", "summarize"]


@dataclass(frozen=True)
class ItemResult:
    """The result of one item."""

    scores: Mapping[str, float]
    """By metric; the mean over the samples of the item."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Prompt, answers and what else explains the scores."""


@dataclass(frozen=True)
class TaskResult:
    """The results of one model on one task, in the order of its items."""

    task: str
    model: str
    items: Sequence[ItemResult]

    def scores(self, metric: str) -> list[float]:
        """The scores of all items."""
        return [item.scores[metric] for item in self.items]

    @property
    def metrics(self) -> Sequence[str]:
        """The names of its metrics."""
        return list(self.items[0].scores)


@dataclass(frozen=True)
class Score:
    """One metric of one model on one task; ``change`` is relative to the first model."""

    task: str
    metric: str
    model: str
    value: float
    interval: Interval | None
    """With 95 % confidence; None if it is not known."""
    method: str
    """How the interval was made: wilson, bootstrap, or stderr."""
    num_items: int
    change: float | None = None
    change_interval: Interval | None = None
    """Of the change, by a bootstrap over the items, which are the same for both models."""

    def as_json(self) -> dict[str, Any]:
        """Returns the score as plain values, for JSON."""
        return {
            "task": self.task,
            "metric": self.metric,
            "model": self.model,
            "score": self.value,
            "interval": None if self.interval is None else list(self.interval),
            "interval_method": self.method,
            "num_items": self.num_items,
            "change": self.change,
            "change_interval": None if self.change_interval is None else list(self.change_interval),
        }


def summarize(results: Sequence[TaskResult]) -> list[Score]:
    """Returns the scores of results, task by task; each task's first result is what the others are compared with.

    >>> before = TaskResult("sums", "base", [ItemResult({"exact_match": 0.0})] * 8)
    >>> after = TaskResult("sums", "trained", [ItemResult({"exact_match": 1.0})] * 8)
    >>> [(score.value, score.change) for score in summarize([before, after])]
    [(0.0, None), (1.0, 1.0)]
    """
    scores: list[Score] = []
    for task in dict.fromkeys(result.task for result in results):
        of_task = [result for result in results if result.task == task]
        for metric in of_task[0].metrics:
            scores += [_score(result, metric, of_task[0]) for result in of_task]
    return scores


def _score(result: TaskResult, metric: str, first: TaskResult) -> Score:
    values = result.scores(metric)
    mean = sum(values) / len(values)
    interval, method = score_interval(values)
    change, change_interval = None, None
    if result is not first:
        differences = [new - old for new, old in zip(values, first.scores(metric), strict=True)]
        change, change_interval = sum(differences) / len(differences), bootstrap_interval(differences)
    return Score(
        result.task, metric, result.model, mean, interval, method, len(values), change, change_interval
    )
