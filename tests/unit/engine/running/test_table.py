"""The invariants of the table of operations, under any order of events."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tinkex.engine.operation import Kind, Operation, State
from tinkex.engine.running.table import OperationTable
from tinkex.engine.scheduler import Turn
from tinkex.engine.store import Outcome, ResultFormat
from tinkex.errors import InvalidInput, OverQuota

DONE = Outcome.done(b"x", ResultFormat.JSON)
RUNS = ("r1", "r2", "r3")
OWNERS = {"r1": "ada", "r2": "ada", "r3": "bob"}
KINDS = (Kind.FORWARD, Kind.FORWARD_BACKWARD, Kind.OPTIM_STEP, Kind.SAVE, Kind.UNLOAD)
MAX_PENDING = 12
GAP_S = 10.0


class TableMachine(RuleBasedStateMachine):
    """Submits, runs, loses, cancels and ends operations in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.table = OperationTable(gap_timeout_s=GAP_S, max_pending=MAX_PENDING, on_ready=lambda: None)
        self.now = 0.0
        self.serial = 0
        self.accepted: dict[str, Operation] = {}
        self.used: set[tuple[str, int]] = set()
        self.turn: Turn | None = None
        self.computed: list[Operation] = []
        self.ended: set[str] = set()
        self.started: dict[str, list[int]] = {run_id: [] for run_id in RUNS}
        self.closed: set[str] = set()
        for run_id in RUNS:
            self.table.resume_run(run_id, 1, [], [], 0.0)

    def accept(self, kind: Kind, run_id: str, seq_id: int, owner: str, tokens: int) -> Operation:
        self.serial += 1
        made = Operation(f"req-{self.serial}", owner, "tiny", run_id, seq_id, kind, tokens)
        self.accepted[made.request_id] = made
        return made

    def pending(self, owner: str) -> int:
        return sum(
            each.owner == owner for each in self.accepted.values() if each.request_id not in self.ended
        )

    @rule(
        run_id=st.sampled_from(RUNS),
        ahead=st.integers(0, 3),
        kind=st.sampled_from(KINDS),
        tokens=st.integers(1, 40),
    )
    def submit(self, run_id: str, ahead: int, kind: Kind, tokens: int) -> None:
        if run_id in self.closed:
            return
        seq_id = max(1, self.table.next_number(run_id) - 2 + ahead)
        if (run_id, seq_id) in self.used:
            return
        try:
            self.table.check_room(OWNERS[run_id], run_id, seq_id)
            self.table.check_number(run_id, seq_id)
        except (InvalidInput, OverQuota):
            return
        self.used.add((run_id, seq_id))
        self.table.add(self.accept(kind, run_id, seq_id, OWNERS[run_id], tokens), self.now)

    @rule(run_id=st.sampled_from(RUNS), ahead=st.integers(0, 3))
    def reject(self, run_id: str, ahead: int) -> None:
        if run_id not in self.closed:
            seq_id = max(1, self.table.next_number(run_id) - 2 + ahead)
            if self.table.reject(run_id, seq_id, self.now):
                assert (run_id, seq_id) not in self.used, "a number is used once"
                self.used.add((run_id, seq_id))

    @rule(owner=st.sampled_from(("ada", "bob")))
    def submit_sample(self, owner: str) -> None:
        try:
            self.table.check_room(owner)
        except OverQuota:
            assert self.pending(owner) >= MAX_PENDING
            return
        self.table.add_sample(self.accept(Kind.SAMPLE, "sampler", 0, owner, 5))

    @precondition(lambda self: self.turn is None)
    @rule()
    def start_turn(self) -> None:
        self.turn = self.table.next_turn(64)
        if self.turn is not None:
            for each in self.turn.operations:
                if each.attempt == 1:
                    self.started[each.run_id].append(each.seq_id)
                assert each.run_id not in self.closed or each.attempt > 1

    @rule()
    def start_sample(self) -> None:
        if self.table.models_with_samples():
            self.table.start_sample("tiny")

    @precondition(lambda self: self.turn is not None)
    @rule()
    def complete_turn(self) -> None:
        assert self.turn is not None
        self.computed += [self.table.compute(each, DONE, ran=True) for each in self.turn.operations]
        self.turn = None

    @rule()
    def complete_sample(self) -> None:
        for each in self.table.all_running_samples()[:1]:
            self.computed.append(self.table.compute(each, DONE))

    @rule()
    def lose_lane(self) -> None:
        self.table.requeue([self.turn] if self.turn is not None else [], self.table.all_running_samples())
        self.turn = None

    @rule(which=st.integers(0, 50))
    def cancel(self, which: int) -> None:
        samples = [each for each in self.accepted.values() if each.kind is Kind.SAMPLE]
        if samples:
            removed = self.table.cancel(samples[which % len(samples)].request_id)
            if removed is not None:
                assert removed.state is State.QUEUED
                self.computed.append(self.table.compute(removed, DONE))

    @rule(seconds=st.floats(0, 15))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for timeout in self.table.expire_gaps(self.now):
            self.computed += [self.table.compute(each, DONE) for each in timeout.expired]
        deadline = self.table.next_gap_deadline()
        assert deadline is None or deadline > self.now

    @rule(run_id=st.sampled_from(RUNS))
    def close_run(self, run_id: str) -> None:
        if run_id not in self.closed:
            self.closed.add(run_id)
            self.computed += [self.table.compute(each, DONE) for each in self.table.close_run(run_id)]

    @rule()
    def commit(self) -> None:
        self.table.end(self.computed)
        self.ended |= {each.request_id for each in self.computed}
        self.computed = []

    @invariant()
    def nothing_is_forgotten(self) -> None:
        unfinished = {each.request_id for each in self.table.unfinished()}
        assert unfinished == self.accepted.keys() - self.ended
        assert all(self.accepted[each].state is State.ENDED for each in self.ended)

    @invariant()
    def an_operation_is_where_its_state_says(self) -> None:
        states = {each.request_id: each.state for each in self.accepted.values()}
        running = {each.request_id for each in self.table.all_running_samples()}
        running |= {each.request_id for each in self.turn.operations} if self.turn is not None else set()
        assert running == {name for name, state in states.items() if state is State.RUNNING}
        computed = {each.request_id for each in self.computed}
        assert computed == {name for name, state in states.items() if state is State.COMPUTED}

    @invariant()
    def a_run_starts_its_operations_in_order(self) -> None:
        for numbers in self.started.values():
            assert numbers == sorted(numbers)
            assert not [number for number, times in Counter(numbers).items() if times > 1]

    @invariant()
    def a_turn_is_a_pass_or_a_single_barrier(self) -> None:
        if self.turn is not None:
            operations = self.turn.operations
            assert len(operations) == 1 or all(each.kind.packs for each in operations)

    def teardown(self) -> None:
        """Whatever happened, everything left can be run to its end."""
        self.lose_lane()
        while (turn := self.table.next_turn(64)) is not None:
            self.computed += [self.table.compute(each, DONE, ran=True) for each in turn.operations]
        while "tiny" in self.table.models_with_samples() and self.table.start_sample("tiny") is not None:
            pass
        self.computed += [self.table.compute(each, DONE) for each in self.table.all_running_samples()]
        self.wait(1000.0)
        while (turn := self.table.next_turn(64)) is not None:
            self.computed += [self.table.compute(each, DONE, ran=True) for each in turn.operations]
        self.commit()
        assert self.table.unfinished() == []


TestTable = TableMachine.TestCase


@pytest.fixture
def table() -> OperationTable:
    return OperationTable(gap_timeout_s=GAP_S, max_pending=MAX_PENDING, on_ready=lambda: None)


def sample(name: str) -> Operation:
    return Operation(name, "ada", "tiny", "sampler", 0, Kind.SAMPLE, 5)


def test_an_interrupted_sample_starts_before_those_that_wait(table: OperationTable) -> None:
    for name in ("first", "second", "third"):
        table.add_sample(sample(name))
    first = table.start_sample("tiny")
    assert first is not None
    table.requeue([], [first])
    assert table.peek_retried_sample("tiny") is first
    assert [each.request_id for _ in range(3) if (each := table.start_sample("tiny"))] == [
        "first",
        "second",
        "third",
    ]
    assert first.attempt == 2


def test_an_interrupted_turn_runs_again_as_it_was_before_anything_else(table: OperationTable) -> None:
    for run_id in RUNS:
        table.resume_run(run_id, 1, [], [], 0.0)
    for run_id in RUNS[:2]:
        table.add(Operation(f"{run_id}-1", "ada", "tiny", run_id, 1, Kind.FORWARD_BACKWARD, 5), 0.0)
    turn = table.next_turn(64)
    assert turn is not None
    table.add(Operation("r3-1", "bob", "tiny", "r3", 1, Kind.FORWARD_BACKWARD, 5), 0.0)
    table.requeue([turn], [])
    assert table.describe("r1-1").reason == "in line with 2 other training operations"
    assert table.next_turn(64) is turn


def test_a_running_sample_is_marked_and_a_waiting_one_is_returned_once(table: OperationTable) -> None:
    table.add_sample(sample("running"))
    running = table.start_sample("tiny")
    table.add_sample(sample("waiting"))
    assert table.cancel("running") is None
    assert running is not None
    assert running.cancelled
    waiting = table.cancel("waiting")
    assert waiting is not None
    assert table.cancel("waiting") is None
    assert table.start_sample("tiny") is None
