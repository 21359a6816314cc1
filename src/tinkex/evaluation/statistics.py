"""Confidence intervals of a mean score: Wilson for scores of 0 and 1, bootstrap for others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

__all__ = ["Interval", "bootstrap_interval", "score_interval", "wilson_interval"]

Z_95 = 1.959963984540054
"""The 97.5th percentile of the normal distribution."""
NUM_RESAMPLES = 2000
MAX_DRAWS = 1 << 20
"""Draws of the bootstrap that are in memory simultaneously."""


class Interval(NamedTuple):
    """A confidence interval of 95 %."""

    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.low:.3f} to {self.high:.3f}"


def wilson_interval(num_right: int, num_items: int) -> Interval:
    """Returns the Wilson score interval of a proportion; it stays within 0 and 1, and is not empty at either.

    >>> str(wilson_interval(7, 10)), str(wilson_interval(10, 10))
    ('0.397 to 0.892', '0.722 to 1.000')
    """
    if num_items < 1:
        raise ValueError("an interval needs at least one item")
    share, z2 = num_right / num_items, Z_95**2
    centre = (share + z2 / (2 * num_items)) / (1 + z2 / num_items)
    half = (
        Z_95
        / (1 + z2 / num_items)
        * math.sqrt(share * (1 - share) / num_items + z2 / (4 * num_items * num_items))
    )
    # At both ends the bound is exact, which rounding would miss.
    low = centre - half if num_right else 0.0
    high = centre + half if num_right < num_items else 1.0
    return Interval(low, high)


def bootstrap_interval(scores: Sequence[float], *, seed: int = 0) -> Interval:
    """Returns the percentile bootstrap interval of the mean: that of the means of 2,000 resamples of the items.

    The same scores give the same interval.

    >>> str(bootstrap_interval([0.5] * 20))
    '0.500 to 0.500'
    """
    if not scores:
        raise ValueError("an interval needs at least one item")
    values = np.asarray(scores, np.float64)
    rng = np.random.default_rng(seed)
    rows = max(1, MAX_DRAWS // len(values))
    means: list[float] = []
    while len(means) < NUM_RESAMPLES:
        count = min(rows, NUM_RESAMPLES - len(means))
        drawn = rng.integers(0, len(values), (count, len(values)))
        means += values[drawn].mean(axis=1).tolist()
    low, high = np.percentile(means, [2.5, 97.5])
    return Interval(float(low), float(high))


def score_interval(scores: Sequence[float]) -> tuple[Interval, str]:
    """Returns the interval of the mean of item scores, and the name of its method.

    >>> score_interval([1.0, 0.0, 1.0])[1], score_interval([0.25, 1.0])[1]
    ('wilson', 'bootstrap')
    """
    if all(score in {0.0, 1.0} for score in scores):
        return wilson_interval(sum(score == 1.0 for score in scores), len(scores)), "wilson"
    return bootstrap_interval(scores), "bootstrap"
