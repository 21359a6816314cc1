from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.engine.scheduler import TokenRate
from tinkex.engine.scheduler.rate_limit import BURST_S


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@given(
    st.floats(1, 1e4),
    st.lists(st.tuples(st.floats(0, 30), st.integers(0, 5000), st.floats(0, 1)), max_size=60),
)
def test_a_user_who_obeys_it_takes_no_more_than_the_rate_the_advance_and_one_operation(
    rate: float, asked: list[tuple[float, int, float]]
) -> None:
    clock = Clock()
    pace = TokenRate[str](rate, clock)
    taken, largest = 0.0, 0
    for pause, tokens, used in asked:
        clock.now += pause
        if pace.wait_s("ada") == 0:
            pace.charge("ada", tokens)
            kept = int(tokens * used)
            pace.charge("ada", kept - tokens)  # it ended immediately and took less than it might have
            taken += kept
            largest = max(largest, tokens)
        most = rate * (clock.now - 1000.0 + BURST_S) + largest
        assert taken <= most + 1e-6 * most


def test_one_waits_as_long_as_it_says_and_others_do_not_wait() -> None:
    clock = Clock()
    pace = TokenRate[str](50, clock)
    pace.charge("ada", 2000)
    assert pace.wait_s("ada") == 30
    assert pace.wait_s("bob") == 0
    clock.now += 29
    assert pace.wait_s("ada") == pytest.approx(1)
    clock.now += 1
    assert pace.wait_s("ada") == 0
    clock.now += 3600  # who was away long has not saved anything up
    pace.charge("ada", 2000)
    assert pace.wait_s("ada") == 30


def test_without_a_rate_no_request_waits() -> None:
    pace = TokenRate[str](None)
    pace.charge("ada", 10**12)
    assert pace.wait_s("ada") == 0
