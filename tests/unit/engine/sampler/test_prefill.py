from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinkex.engine.sampler.prefill import split_token_budget


@pytest.mark.parametrize(
    ("remaining", "budget", "expected"),
    [
        ([], 512, []),
        ([100], 512, [100]),
        ([8000], 512, [512]),
        ([8000, 40, 500], 512, [256, 40, 216]),
        ([40, 8000], 512, [40, 472]),
        ([100, 100, 100], 512, [100, 100, 100]),
        ([300, 300, 300], 512, [300, 212, 0]),
        ([5, 5], 1, [1, 0]),
    ],
)
def test_a_pass_is_shared_by_age_and_by_what_is_left(
    remaining: list[int], budget: int, expected: list[int]
) -> None:
    assert split_token_budget(remaining, budget) == expected


@settings(deadline=None)
@given(st.lists(st.integers(0, 1000), max_size=20), st.integers(1, 600))
def test_a_pass_is_filled_and_never_overfilled(remaining: list[int], budget: int) -> None:
    counts = split_token_budget(remaining, budget)
    assert sum(counts) == min(budget, sum(remaining))
    assert all(0 <= count <= left for count, left in zip(counts, remaining, strict=True))


@settings(deadline=None)
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=20), st.integers(2, 600))
def test_a_long_prompt_and_the_shortest_behind_it_both_get_on(behind: list[int], budget: int) -> None:
    counts = split_token_budget([10_000, *behind], budget)
    assert counts[0] >= budget // 2
    assert counts[1 + behind.index(min(behind))] == min(*behind, budget // 2)
