from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tinkex.engine.operation import Kind, Operation
from tinkex.engine.scheduler import FairShare, SampleQueue


def test_parties_that_always_have_work_share_equally_by_cost() -> None:
    turns, served, cost = FairShare[str](), {"big": 0, "small": 0}, {"big": 10, "small": 1}
    for _ in range(1100):
        turns.waiting(served.keys())
        chosen = turns.pick(served)
        turns.charge(chosen, cost[chosen])
        served[chosen] += cost[chosen]
    assert abs(served["big"] - served["small"]) <= 10


def test_being_away_earns_nothing() -> None:
    turns = FairShare[str]()
    for _ in range(100):
        turns.waiting(["here"])
        turns.charge(turns.pick(["here"]), 1)
    picks = []
    for _ in range(10):
        turns.waiting(["here", "back"])
        chosen = turns.pick(["here", "back"])
        turns.charge(chosen, 1)
        picks.append(chosen)
    assert 4 <= picks.count("here") <= 6


def test_leaving_for_a_moment_does_not_cancel_a_debt() -> None:
    turns = FairShare[str]()
    turns.waiting(["a", "b"])
    turns.charge(turns.pick(["a", "b"]), 100)
    turns.waiting(["b"])
    turns.charge(turns.pick(["b"]), 1)
    turns.waiting(["a", "b"])
    assert turns.pick(["a", "b"]) == "b"


def sample(name: str, owner: str, tokens: int = 1) -> Operation:
    return Operation(name, owner, "base", "sampler", 0, Kind.SAMPLE, tokens)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 50)), max_size=30))
def test_every_waiting_sample_is_taken_once_and_in_order_per_user(items: list[tuple[str, int]]) -> None:
    queue = SampleQueue()
    for number, (owner, tokens) in enumerate(items):
        queue.put(sample(f"{owner}{number}", owner, tokens))
    assert len(queue) == len(items)
    taken = [each for _ in items if (each := queue.take()) is not None]
    assert queue.take() is None
    for owner in "abc":
        names = [each.request_id for each in taken if each.owner == owner]
        assert names == [f"{t}{n}" for n, (t, _) in enumerate(items) if t == owner]


def test_a_cancelled_sample_leaves_the_queue() -> None:
    queue = SampleQueue()
    one = sample("one", "a")
    queue.put(one)
    queue.put(sample("two", "a"))
    queue.remove(one)
    assert len(queue) == 1
    remaining = queue.take()
    assert remaining is not None
    assert remaining.request_id == "two"
