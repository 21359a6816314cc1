from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.engine.operation import Kind, Operation
from tinkex.engine.scheduler import FairShare, Queue, next_turns
from tinkex.errors import InvalidInput


def step(
    seq_id: int, kind: Kind = Kind.OPTIM_STEP, run: str = "run", owner: str = "ada", tokens: int = 0
) -> Operation:
    return Operation(f"{run}#{seq_id}", owner, "base", run, seq_id, kind, tokens)


def opened(*runs: str, gap_timeout_s: float = 300.0) -> Queue:
    queue = Queue(gap_timeout_s)
    for run in runs or ("run",):
        queue.open(run)
    return queue


def drain(queue: Queue, budget: int = 64) -> list[str]:
    turns, done = FairShare[str](), list[str]()
    while taken := next_turns(queue, turns, budget):
        done += [each.request_id for turn in taken for each in turn]
    return done


def test_operations_wait_for_the_numbers_before_them() -> None:
    queue = opened()
    queue.put(step(2), now=0.0)
    queue.put(step(3), now=0.0)
    assert queue.first("run") is None
    assert queue.missing_number("run", 3) == 1
    queue.put(step(1), now=1.0)
    assert queue.missing_number("run", 3) is None
    assert drain(queue) == ["run#1", "run#2", "run#3"]


def test_the_operation_that_creates_a_run_comes_first() -> None:
    queue = Queue(300.0)
    queue.open("run", first=step(0, Kind.CREATE))
    queue.put(step(1), now=0.0)
    assert drain(queue) == ["run#0", "run#1"]


def test_a_rejected_number_is_used_up() -> None:
    queue = opened()
    queue.put(step(3), now=0.0)
    queue.reject("run", 2, now=0.0)
    queue.reject("run", 1, now=0.0)
    assert drain(queue) == ["run#3"]
    with pytest.raises(InvalidInput, match="used up"):
        queue.check_number("run", 2)


def test_a_number_rejected_ahead_of_its_turn_is_used_up_too() -> None:
    queue = opened()
    queue.reject("run", 2, now=0.0)
    with pytest.raises(InvalidInput, match="used up"):
        queue.check_number("run", 2)
    assert queue.next_number("run") == 3


def test_numbers_below_one_are_rejected() -> None:
    with pytest.raises(InvalidInput, match="numbered from 1"):
        opened().check_number("run", 0)


@pytest.mark.parametrize("seq_id", [200_000, 2**63 - 1, 2**200])
def test_a_number_that_nobody_counted_to_is_rejected_and_uses_up_nothing(seq_id: int) -> None:
    queue = opened()
    with pytest.raises(InvalidInput, match="far ahead: the next one is 1"):
        queue.check_number("run", seq_id)
    assert not queue.reject("run", seq_id, now=0.0)
    assert queue.next_number("run") == 1
    queue.put(step(1), now=0.0)
    assert drain(queue) == ["run#1"]


def test_a_gap_that_stays_open_fails_those_who_wait_and_the_run_continues() -> None:
    queue = opened(gap_timeout_s=10.0)
    queue.put(step(1), now=0.0)
    queue.put(step(3), now=5.0)
    queue.put(step(4), now=9.0)
    assert queue.next_gap_deadline() == 15.0
    assert queue.expire_gaps(14.9) == []
    (timeout,) = queue.expire_gaps(15.0)
    assert timeout.missing == 2
    assert [operation.seq_id for operation in timeout.expired] == [3, 4]
    assert queue.next_gap_deadline() is None
    with pytest.raises(InvalidInput, match="used up"):
        queue.check_number("run", 2)
    queue.put(step(5), now=16.0)
    assert drain(queue) == ["run#1", "run#5"]


def test_a_run_is_unloaded_though_a_number_before_never_came() -> None:
    queue = opened(gap_timeout_s=10.0)
    queue.put(step(2), now=0.0)
    queue.put(step(3, Kind.UNLOAD), now=0.0)
    (timeout,) = queue.expire_gaps(10.0)
    assert [operation.seq_id for operation in timeout.expired] == [2]
    assert [operation.seq_id for operation in timeout.ready] == [3]
    assert drain(queue) == ["run#3"]


def test_a_gap_that_is_filled_in_time_fails_no_operation() -> None:
    queue = opened(gap_timeout_s=10.0)
    queue.put(step(2), now=0.0)
    queue.put(step(1), now=9.0)
    assert queue.expire_gaps(100.0) == []
    assert drain(queue) == ["run#1", "run#2"]


def test_the_clock_of_a_second_gap_starts_when_the_first_is_filled() -> None:
    queue = opened(gap_timeout_s=10.0)
    queue.put(step(2), now=0.0)
    queue.put(step(4), now=0.0)
    queue.put(step(1), now=9.0)
    assert queue.expire_gaps(18.0) == []
    (timeout,) = queue.expire_gaps(19.0)
    assert [operation.seq_id for operation in timeout.expired] == [4]


def test_closing_a_run_returns_what_had_not_run() -> None:
    queue = opened()
    queue.put(step(1), now=0.0)
    queue.put(step(3), now=0.0)
    assert [w.seq_id for w in queue.close("run")] == [1, 3]
    assert queue.close("run") == []


@given(st.permutations(range(1, 13)))
def test_any_order_of_arrival_runs_in_the_order_of_numbers(arrival: list[int]) -> None:
    queue = opened()
    for seq_id in arrival:
        queue.check_number("run", seq_id)
        queue.put(step(seq_id), now=0.0)
    assert drain(queue) == [f"run#{n}" for n in range(1, 13)]


KINDS = st.sampled_from([Kind.FORWARD, Kind.FORWARD_BACKWARD, Kind.OPTIM_STEP, Kind.SAVE])


@given(data=st.data())
def test_nothing_is_lost_and_nothing_runs_twice(data: st.DataObject) -> None:
    runs = [f"run{i}" for i in range(data.draw(st.integers(1, 4)))]
    queue, turns = opened(*runs, gap_timeout_s=10.0), FairShare[str]()
    budget = data.draw(st.integers(1, 60))
    arrivals: list[Operation] = []
    for index, run in enumerate(runs):
        for seq_id in range(1, data.draw(st.integers(0, 6)) + 1):
            tokens, kind = data.draw(st.integers(1, 40)), data.draw(KINDS)
            arrivals.append(step(seq_id, kind, run, f"owner{index % 2}", tokens))
    arrivals = data.draw(st.permutations(arrivals))
    rejected = (
        {w.request_id for w in arrivals if data.draw(st.booleans())} if data.draw(st.booleans()) else set()
    )
    late = {w.request_id for w in arrivals if data.draw(st.integers(0, 9)) == 0}

    done: list[Operation] = []
    missed: list[Operation] = []

    def run_some() -> None:
        while data.draw(st.booleans()) and (taken := next_turns(queue, turns, budget)):
            done.extend(each for turn in taken for each in turn)

    for item in arrivals:
        if item.request_id in late:
            continue
        if item.request_id in rejected:
            queue.reject(item.run_id, item.seq_id, now=0.0)
        else:
            queue.put(item, now=0.0)
        run_some()
    missed += [each for timeout in queue.expire_gaps(now=10.0) for each in timeout.expired]
    while taken := next_turns(queue, turns, budget):
        for operations in taken:
            assert len(operations) == 1 or sum(each.num_tokens for each in operations) <= budget
            assert len(operations) == 1 or all(each.kind.packs for each in operations)
            done.extend(operations)
        if len(taken) > 1:
            assert all(turn[0].kind is Kind.OPTIM_STEP for turn in taken)
            assert len({turn[0].run_id for turn in taken}) == len(taken)

    accepted = {w.request_id for w in arrivals} - rejected - late
    assert sorted(w.request_id for w in [*done, *missed]) == sorted(accepted)
    for run in runs:
        order = [w.seq_id for w in done if w.run_id == run]
        assert order == sorted(order)


def test_runs_are_those_named_longest_in_the_queue_first() -> None:
    queue = opened("a", "b", "c")
    for run in "abc":
        queue.put(step(1, run=run), now=0.0)
        queue.put(step(2, run=run), now=0.0)
    first = queue.first("a")
    assert first is not None
    queue.take(first)
    assert queue.runs() == ["b", "c", "a"]
    assert queue.runs(among={"a", "c", "unknown"}) == ["c", "a"]
    assert [each.request_id for each in queue.next_operations(among={"b"})] == ["b#1"]
    queue.close("b")
    assert queue.runs() == ["c", "a"]
