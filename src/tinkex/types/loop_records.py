"""What training loops report, and what servers derive from their operations: metrics by step, and rollouts."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

import msgspec

from tinkex.types.base import Value

__all__ = [
    "LogMetricsRequest",
    "LogRolloutsRequest",
    "LoggedRollout",
    "MetricSeries",
    "Rollout",
    "RolloutsResponse",
    "TrainingRunMetrics",
]


class Rollout(Value, frozen=True, kw_only=True):
    """One answer that a loop sampled in a step, with its reward; ``logprobs`` and ``advantages`` have a value per token.

    Rollouts with the same ``group`` are answers to the same prompt. ``metrics`` are parts of the reward, or whatever else was
    measured.

    >>> rollout = Rollout(tokens=[4, 5], logprobs=[-0.1, -0.7], reward=1.0, group="17", text=" 4")
    >>> rollout.reward
    1.0
    >>> Rollout(tokens=[4, 5], logprobs=[-0.1])
    Traceback (most recent call last):
      ...
    ValueError: logprobs has 1 values, and the rollout has 2 tokens
    """

    tokens: list[int] = msgspec.field(default_factory=list)
    logprobs: list[float] | None = None
    advantages: list[float] | None = None
    reward: float | None = None
    advantage: float | None = None
    group: str = ""
    prompt_tokens: list[int] | None = None
    prompt: str | None = None
    text: str | None = None
    metrics: dict[str, float] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.tokens and self.text is None:
            raise ValueError("a rollout has tokens, or a text")
        for name, values in (("logprobs", self.logprobs), ("advantages", self.advantages)):
            if values is not None and len(values) != len(self.tokens):
                raise ValueError(
                    f"{name} has {len(values)} values, and the rollout has {len(self.tokens)} tokens"
                )


class LogMetricsRequest(Value, frozen=True, kw_only=True):
    """Metrics that a loop logs for a step; a value that is not finite is sent as null."""

    model_id: str
    step: int
    metrics: dict[str, float | None]


class LogRolloutsRequest(Value, frozen=True, kw_only=True):
    """Rollouts of a step; ``first`` is the number of the first one among those of the step, so that a repeated request counts once."""

    model_id: str
    step: int
    first: int = 0
    rollouts: list[Rollout]


class MetricSeries(Value, frozen=True, kw_only=True):
    """One metric of a run over its steps; a value that is not finite is None.

    ``source`` is ``automatic`` for metrics of the server, whose steps count the optimizer steps, and ``logged`` for those of the loop.
    ``tokens`` are those that the run had trained by then, and ``times`` are seconds since 1970. With fewer points than
    ``num_values``, the first and the last are there, and the lowest and the highest of each part of the range.
    """

    name: str
    source: Literal["automatic", "logged"]
    num_values: int
    steps: list[int]
    values: list[float | None]
    times: list[float]
    tokens: list[int]


class TrainingRunMetrics(Value, frozen=True, kw_only=True):
    """How far the loop of a run is, and its metrics.

    Example:
        >>> metrics = rest.get_training_run_metrics(run_id).result()
        >>> metrics["loss:sum"].values[-1]
    """

    training_run_id: str
    num_steps: int
    """Its optimizer steps."""
    num_tokens: int
    """The tokens of their passes."""
    series: list[MetricSeries]

    def __getitem__(self, name: str) -> MetricSeries:
        """Returns the metric of that name; one that the loop logged before one of the server."""
        found = [one for one in self.series if one.name == name]
        if not found:
            known = ", ".join(one.name for one in self.series) or "none"
            raise KeyError(f"run {self.training_run_id} has no metric {name!r}; it has: {known}")
        return next((one for one in found if one.source == "logged"), found[0])


class LoggedRollout(Value, frozen=True, kw_only=True):
    """A rollout as it is stored: when it was reported, and its number within the step."""

    step: int
    place: int
    time: datetime
    rollout: Rollout


class RolloutsResponse(Value, frozen=True, kw_only=True):
    """A page of the rollouts of a step, and the steps of the run that have rollouts."""

    steps: list[int]
    rollouts: list[LoggedRollout]
