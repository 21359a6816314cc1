"""How many samplers there should be: with a virtual clock, from a burst to silence."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.engine.scheduler import Demand, SamplerScaling
from tinkex.engine.scheduler.sampler_scaling import ADD_AFTER_S, RETRY_AFTER_S

PLACES, IDLE_S = 10, 60.0


class Samplers:
    """A number of samplers that follows every decision, on a clock of its own."""

    def __init__(self, *, fewest: int = 1, most: int = 4) -> None:
        self.scaling = SamplerScaling(fewest=fewest, most=most, places=PLACES, idle_s=IDLE_S)
        self.number = fewest
        self.now = 1000.0

    def run(self, *demands: Demand, seconds: float = 0.0) -> int:
        """Has the same demand for some seconds, looked at every half a second; returns the number after that."""
        until = self.now + seconds
        self.number = self.scaling.wanted(demands, self.number, self.now)
        while self.now < until:
            self.now += 0.5
            self.number = self.scaling.wanted(demands, self.number, self.now)
        return self.number


IDLE = Demand(0, 0)
FULL = Demand(waiting=15, decoding=10)


def test_a_short_wait_adds_nothing_and_a_longer_one_what_it_fills() -> None:
    samplers = Samplers()
    assert samplers.run(FULL, seconds=ADD_AFTER_S - 0.5) == 1
    assert samplers.run(IDLE) == 1
    assert samplers.run(FULL, seconds=ADD_AFTER_S - 0.5) == 1, "the wait begins again"
    assert samplers.run(FULL, seconds=0.5) == 3
    assert samplers.run(FULL, seconds=100) == 3, "those that start count"
    assert samplers.run(Demand(900, 10), seconds=100) == 4, "never more than the maximum"


def test_without_a_sampler_one_is_added_immediately() -> None:
    assert Samplers(fewest=0).run(Demand(1, 0)) == 1


def test_a_full_batch_without_samples_that_wait_is_enough() -> None:
    assert Samplers().run(Demand(0, 13), seconds=100) == 1


def test_samplers_are_removed_when_fewer_were_enough_for_the_whole_time() -> None:
    samplers = Samplers()
    samplers.run(Demand(30, 10), seconds=10)
    assert samplers.number == 4
    assert samplers.run(Demand(0, 9), seconds=IDLE_S - 1) == 4
    assert samplers.run(Demand(0, 18)) == 4, "of twice the places that are needed"
    assert samplers.run(IDLE, seconds=10) == 4
    assert samplers.run(Demand(0, 8)) == 4
    assert samplers.run(IDLE, seconds=IDLE_S) == 2, "what the busiest moment since needed"


def test_one_model_with_places_does_not_make_up_for_another_without() -> None:
    assert Samplers().run(IDLE, FULL, seconds=10) == 3


@pytest.mark.parametrize("fewest", [0, 1, 2])
def test_silence_leaves_the_minimum(fewest: int) -> None:
    samplers = Samplers(fewest=fewest)
    samplers.run(Demand(100, 0), seconds=10)
    assert samplers.number == 4
    assert samplers.run(IDLE, seconds=IDLE_S + 1) == fewest


def test_without_room_none_is_added_for_a_while() -> None:
    samplers = Samplers()
    samplers.run(FULL, seconds=10)
    samplers.scaling.refuse(samplers.now)
    samplers.number = 2
    assert samplers.run(FULL, seconds=RETRY_AFTER_S - 1) == 2
    assert samplers.run(FULL, seconds=ADD_AFTER_S + 1) == 3


@given(
    demands=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 60), st.floats(0.0, 200.0)), max_size=30),
    fewest=st.integers(0, 3),
    more=st.integers(1, 5),
)
def test_the_number_stays_between_its_limits_and_does_not_change_back_and_forth(
    demands: Sequence[tuple[int, int, float]], fewest: int, more: int
) -> None:
    samplers = Samplers(fewest=fewest, most=fewest + more)
    added_at = float("-inf")
    for waiting, decoding, seconds in demands:
        samplers.now += seconds
        before = samplers.number
        after = samplers.run(Demand(waiting, decoding))
        assert fewest <= after <= fewest + more
        if after > before:
            assert waiting
            added_at = samplers.now
        if after < before:
            assert samplers.now - added_at >= IDLE_S
