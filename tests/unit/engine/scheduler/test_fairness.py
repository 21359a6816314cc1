from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tinkex.engine.scheduler import FairShare, Kind, SampleQueue, Work


def test_parties_that_always_want_share_equally_by_cost() -> None:
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


def sample(name: str, tenant: str, tokens: int = 1) -> Work[None]:
    return Work(name, tenant, "base", "sampler", 0, Kind.SAMPLE, tokens, None)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 50)), max_size=30))
def test_every_waiting_sample_is_taken_once_and_in_order_per_user(items: list[tuple[str, int]]) -> None:
    queue = SampleQueue[None]()
    for number, (tenant, tokens) in enumerate(items):
        queue.put(sample(f"{tenant}{number}", tenant, tokens))
    assert len(queue) == len(items)
    taken = [work for _ in items if (work := queue.take()) is not None]
    assert queue.take() is None
    for tenant in "abc":
        names = [w.request_id for w in taken if w.tenant == tenant]
        assert names == [f"{t}{n}" for n, (t, _) in enumerate(items) if t == tenant]


def test_a_cancelled_sample_leaves_the_queue() -> None:
    queue = SampleQueue[None]()
    queue.put(sample("one", "a"))
    queue.put(sample("two", "a"))
    assert "one" in queue
    cancelled = queue.cancel("one")
    assert cancelled is not None
    assert cancelled.request_id == "one"
    assert queue.cancel("one") is None
    assert "one" not in queue
    remaining = queue.take()
    assert remaining is not None
    assert remaining.request_id == "two"
