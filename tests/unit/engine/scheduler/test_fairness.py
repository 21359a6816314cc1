from __future__ import annotations

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from tinkex.engine.operation import Kind, Operation
from tinkex.engine.scheduler import FairShare, SampleQueue
from tinkex.engine.scheduler.fairness import Round


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


def test_a_round_gives_every_place_to_the_party_served_least_by_then() -> None:
    shares = FairShare[str]()
    shares.waiting(["a", "b", "c"])
    shares.charge("a", 5)
    order, served = Round(shares, ["a", "b", "c"]), []
    for _ in range(6):
        party = order.next()
        assert party is not None
        served.append(party)
        shares.charge(party, 3)
        order.again()
    assert served == ["b", "c", "b", "c", "a", "b"]


def test_accounts_of_parties_that_left_without_a_debt_are_not_kept() -> None:
    shares = FairShare[int]()
    for party in range(1000):
        shares.arrive(party)
        shares.charge(shares.pick([party]), 1)
        shares.leave(party)
        shares.arrive(-1)
        shares.pick([-1])
        shares.charge(-1, 2)
    shares.arrive(1)
    assert shares.account(1) == shares.account(-1) - 2, "it starts at the level"


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


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from("xy"), st.integers(0, 50)), max_size=30))
def test_samplers_take_what_is_assigned_to_them_in_the_order_of_one_queue(
    items: list[tuple[str, str, int]],
) -> None:
    by_scan, by_lane = SampleQueue(), SampleQueue()
    lanes = {f"{owner}{number}": lane for number, (owner, lane, _) in enumerate(items)}
    for number, (owner, _, tokens) in enumerate(items):
        by_scan.put(sample(f"{owner}{number}", owner, tokens))
        by_lane.put(sample(f"{owner}{number}", owner, tokens))
    for number in range(2 * len(items)):
        lane = "xy"[number % 2]
        expected = by_scan.take(lambda each, lane=lane: lanes[each.request_id] == lane)  # type: ignore[misc]
        found = by_lane.take_assigned(lane, lambda each: lanes[each.request_id])
        assert (found and found.request_id) == (expected and expected.request_id)
    assert len(by_lane) == len(by_scan) == 0


def test_a_sample_is_assigned_once_however_many_wait() -> None:
    queue, asked = SampleQueue(), list[str]()
    for number in range(100):
        queue.put(sample(f"r{number}", f"user-{number}"))

    def assign(operation: Operation) -> str:
        asked.append(operation.request_id)
        return "x" if len(asked) % 2 else "y"

    taken = [queue.take_assigned("x", assign) for _ in range(60)]
    assert sum(each is not None for each in taken) == 50
    assert len(asked) == 100


def test_samples_of_a_sampler_that_is_lost_are_assigned_again() -> None:
    queue = SampleQueue()
    for name in ("one", "two"):
        queue.put(sample(name, "a"))
    assert queue.take_assigned("x", lambda each: "y") is None
    queue.assign_again()
    taken = [queue.take_assigned("x", lambda each: "x") for _ in range(3)]
    assert [each and each.request_id for each in taken] == ["one", "two", None]


def test_a_cancelled_sample_leaves_its_sampler_too() -> None:
    queue = SampleQueue()
    one = sample("one", "a")
    queue.put(one)
    queue.put(sample("two", "b"))
    assert queue.take_assigned("y", lambda each: "x") is None
    queue.remove(one)
    taken = queue.take_assigned("x", lambda each: "x")
    assert taken is not None
    assert taken.request_id == "two"
    assert len(queue) == 0


def test_users_that_come_and_go_leave_nothing_behind() -> None:
    queue = SampleQueue()

    def come_and_go(times: int) -> None:
        for number in range(times):
            queue.put(sample(f"r{number}", "a"))
            assert queue.take_assigned("x", lambda each: "x") is not None

    come_and_go(500)
    tracemalloc.start()
    try:
        come_and_go(5000)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 50_000
