"""Intervals: against their definitions, and against how often they contain the truth."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.evaluation.statistics import Z_95, bootstrap_interval, score_interval, wilson_interval


@given(st.integers(1, 2000), st.floats(0, 1))
def test_the_bounds_of_wilson_are_the_shares_that_a_score_test_just_accepts(
    num_items: int, part: float
) -> None:
    num_right = round(part * num_items)
    share = num_right / num_items
    for bound in wilson_interval(num_right, num_items):
        assert 0 <= bound <= 1
        if 0 < bound < 1:
            error = math.sqrt(bound * (1 - bound) / num_items)
            assert abs(share - bound) == pytest.approx(Z_95 * error, rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("num_items", [1, 7, 53, 1000])
def test_an_interval_of_nothing_or_everything_reaches_the_end(num_items: int) -> None:
    assert wilson_interval(0, num_items).low == 0
    assert wilson_interval(num_items, num_items).high == 1


@pytest.mark.slow
def test_intervals_contain_the_true_mean_about_as_often_as_they_say() -> None:
    rng = np.random.default_rng(1)
    inside = {"wilson": 0, "bootstrap": 0}
    for _ in range(300):
        right = rng.random(80) < 0.3
        low, high = wilson_interval(int(right.sum()), 80)
        inside["wilson"] += low <= 0.3 <= high
        low, high = bootstrap_interval(rng.beta(2, 3, 80).tolist())
        inside["bootstrap"] += low <= 0.4 <= high
    assert all(0.90 <= count / 300 <= 0.99 for count in inside.values()), inside


def test_the_same_scores_give_the_same_interval_also_of_many_items() -> None:
    scores = np.random.default_rng(0).random(3000).tolist()
    assert bootstrap_interval(scores) == bootstrap_interval(scores)
    low, high = bootstrap_interval(scores)
    assert low < sum(scores) / 3000 < high


def test_scores_of_zero_and_one_have_a_wilson_interval() -> None:
    assert score_interval([1.0] * 9 + [0.0]) == (wilson_interval(9, 10), "wilson")
    assert score_interval([0.5, 1.0])[1] == "bootstrap"


def test_no_items_have_no_interval() -> None:
    with pytest.raises(ValueError, match="at least one item"):
        wilson_interval(0, 0)
    with pytest.raises(ValueError, match="at least one item"):
        bootstrap_interval([])
