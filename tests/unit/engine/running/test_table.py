"""The invariants of the table of operations, under any order of events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tinkex.engine.operation import Kind, Operation, State
from tinkex.engine.running.budgets import Budgets
from tinkex.engine.running.table import OperationTable
from tinkex.engine.scheduler import Turn
from tinkex.engine.store import Outcome, ResultFormat
from tinkex.errors import Busy, InvalidInput, OverQuota
from tinkex.types import UnloadModelRequest

LANE = "lane-0"
DONE = Outcome.done(b"x", ResultFormat.JSON)
REQUEST = UnloadModelRequest(model_id="r1")
RUNS = ("r1", "r2", "r3")
OWNERS = {"r1": "ada", "r2": "ada", "r3": "bob"}
KINDS = (Kind.FORWARD, Kind.FORWARD_BACKWARD, Kind.OPTIM_STEP, Kind.SAVE, Kind.UNLOAD)
MAX_PENDING = 12
BUDGETS = Budgets(
    max_operations=MAX_PENDING, max_bytes_per_user=60, max_bytes=100, reserve_bytes=30, max_held_bytes=40
)
MAX_SIZE = 30
GAP_S = 10.0


class TableMachine(RuleBasedStateMachine):
    """Submits, runs, loses, cancels and ends operations in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.table = OperationTable(gap_timeout_s=GAP_S, budgets=BUDGETS, on_ready=lambda: None)
        self.now = 0.0
        self.serial = 0
        self.accepted: dict[str, Operation] = {}
        self.used: set[tuple[str, int]] = set()
        self.turns: Sequence[Turn] = ()
        self.computed: list[Operation] = []
        self.ended: set[str] = set()
        self.started: dict[str, list[int]] = {run_id: [] for run_id in RUNS}
        self.closed: set[str] = set()
        for run_id in RUNS:
            self.table.resume_run(run_id, 1, [], [], 0.0)

    def accept(self, kind: Kind, run_id: str, seq_id: int, owner: str, tokens: int, size: int) -> Operation:
        self.serial += 1
        made = Operation(f"req-{self.serial}", owner, "tiny", run_id, seq_id, kind, tokens)
        made.request, made.num_bytes, made.held_bytes = REQUEST, size, size
        self.accepted[made.request_id] = made
        return made

    def pending(self, owner: str) -> int:
        return sum(
            each.owner == owner for each in self.accepted.values() if each.request_id not in self.ended
        )

    def num_bytes(self, owner: str) -> int:
        unfinished = (each for each in self.accepted.values() if each.request_id not in self.ended)
        return sum(each.num_bytes for each in unfinished if each.owner == owner)

    @rule(
        run_id=st.sampled_from(RUNS),
        ahead=st.integers(0, 3),
        kind=st.sampled_from(KINDS),
        tokens=st.integers(1, 40),
        size=st.integers(1, MAX_SIZE),
    )
    def submit(self, run_id: str, ahead: int, kind: Kind, tokens: int, size: int) -> None:
        if run_id in self.closed:
            return
        seq_id = max(1, self.table.next_number(run_id) - 2 + ahead)
        if (run_id, seq_id) in self.used:
            return
        try:
            self.table.check_room(OWNERS[run_id], size, run_id, seq_id)
            self.table.check_number(run_id, seq_id)
        except (InvalidInput, Busy):
            return
        self.used.add((run_id, seq_id))
        self.table.add(self.accept(kind, run_id, seq_id, OWNERS[run_id], tokens, size), self.now)

    @rule(run_id=st.sampled_from(RUNS), ahead=st.integers(0, 3))
    def reject(self, run_id: str, ahead: int) -> None:
        if run_id not in self.closed:
            seq_id = max(1, self.table.next_number(run_id) - 2 + ahead)
            if self.table.reject(run_id, seq_id, self.now):
                assert (run_id, seq_id) not in self.used, "a number is used once"
                self.used.add((run_id, seq_id))

    @rule(owner=st.sampled_from(("ada", "bob")), size=st.integers(1, MAX_SIZE))
    def submit_sample(self, owner: str, size: int) -> None:
        try:
            self.table.check_room(owner, size)
        except OverQuota:
            too_large = self.num_bytes(owner) + size > BUDGETS.max_bytes_per_user
            assert self.pending(owner) >= MAX_PENDING or too_large
            return
        except Busy:
            assert self.num_bytes("ada") + self.num_bytes("bob") + size > BUDGETS.max_bytes
            return
        self.table.add(self.accept(Kind.SAMPLE, "sampler", 0, owner, 5, size), self.now)

    @precondition(lambda self: not self.turns)
    @rule()
    def start_turn(self) -> None:
        self.turns = self.table.next_turns(64, lane=LANE)
        for each in (each for turn in self.turns for each in turn):
            if each.attempt == 1:
                self.started[each.run_id].append(each.seq_id)
            assert each.run_id not in self.closed or each.attempt > 1

    @rule()
    def start_sample(self) -> None:
        if self.table.queued_samples(LANE):
            self.table.start_sample(LANE, "tiny")

    @precondition(lambda self: self.turns)
    @rule()
    def complete_turn(self) -> None:
        for turn in self.turns:
            self.computed += self.table.compute(turn, DONE)
        self.turns = ()

    @rule()
    def complete_sample(self) -> None:
        self.computed += self.table.compute(self.table.running_samples(LANE)[:1], DONE)

    @rule()
    def lose_lane(self) -> None:
        self.table.requeue(self.turns, self.table.running_samples(LANE))
        self.turns = ()

    @rule(which=st.integers(0, 50))
    def cancel(self, which: int) -> None:
        samples = [each for each in self.accepted.values() if each.kind is Kind.SAMPLE]
        if samples:
            removed = self.table.cancel(samples[which % len(samples)].request_id)
            if removed is not None:
                assert removed.state is State.QUEUED
                self.computed += self.table.compute([removed], DONE)

    @rule(seconds=st.floats(0, 15))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for timeout in self.table.expire_gaps(self.now):
            self.computed += self.table.compute(timeout.expired, DONE)
        deadline = self.table.next_gap_deadline()
        assert deadline is None or deadline > self.now

    @rule(run_id=st.sampled_from(RUNS))
    def close_run(self, run_id: str) -> None:
        if run_id not in self.closed:
            self.closed.add(run_id)
            self.computed += self.table.compute(self.table.close_run(run_id), DONE)

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
    def budgets_are_never_exceeded(self) -> None:
        reserve = BUDGETS.reserve_bytes
        own = {owner: self.num_bytes(owner) for owner in ("ada", "bob")}
        assert max(own.values()) <= BUDGETS.max_bytes_per_user + reserve
        assert self.table.num_bytes == sum(own.values()) <= BUDGETS.max_bytes + reserve

    @invariant()
    def only_so_much_is_in_memory_and_what_is_not_can_be_read_again(self) -> None:
        waiting = [each for each in self.accepted.values() if each.state in {State.RECORDED, State.QUEUED}]
        held = sum(each.held_bytes for each in waiting)
        assert self.table.held_bytes == held <= BUDGETS.max_held_bytes
        assert all(each.request is REQUEST or each.held_bytes == 0 for each in waiting)

    @invariant()
    def an_operation_is_where_its_state_says(self) -> None:
        states = {each.request_id: each.state for each in self.accepted.values()}
        running = {each.request_id for each in self.table.running_samples(LANE)}
        running |= {each.request_id for turn in self.turns for each in turn}
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
        for turn in self.turns:
            assert len(turn) == 1 or all(each.kind.packs for each in turn)

    @invariant()
    def turns_that_run_together_are_of_different_runs(self) -> None:
        if len(self.turns) > 1:
            assert len({turn[0].run_id for turn in self.turns}) == len(self.turns)

    def run_turns(self) -> None:
        while turns := self.table.next_turns(64, lane=LANE):
            for turn in turns:
                self.computed += self.table.compute(turn, DONE)

    def teardown(self) -> None:
        """Whatever happened, everything left can be run to its end."""
        self.lose_lane()
        self.run_turns()
        while "tiny" in self.table.queued_samples(LANE) and self.table.start_sample(LANE, "tiny") is not None:
            pass
        self.computed += self.table.compute(self.table.running_samples(LANE), DONE)
        self.wait(1000.0)
        self.run_turns()
        self.commit()
        assert self.table.unfinished() == []


TestTable = TableMachine.TestCase


@pytest.fixture
def table() -> OperationTable:
    return OperationTable(gap_timeout_s=GAP_S, budgets=BUDGETS, on_ready=lambda: None)


def sample(name: str) -> Operation:
    return Operation(name, "ada", "tiny", "sampler", 0, Kind.SAMPLE, 5)


def test_an_interrupted_sample_starts_before_those_that_wait(table: OperationTable) -> None:
    for name in ("first", "second", "third"):
        table.add(sample(name), 0.0)
    first = table.start_sample(LANE, "tiny")
    assert first is not None
    table.requeue([], [first])
    assert table.peek_retried_sample("tiny") is first
    assert [each.request_id for _ in range(3) if (each := table.start_sample(LANE, "tiny"))] == [
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
    (turn,) = table.next_turns(64, lane=LANE)
    table.add(Operation("r3-1", "bob", "tiny", "r3", 1, Kind.FORWARD_BACKWARD, 5), 0.0)
    table.requeue([turn], [])
    assert table.describe("r1-1").reason == "in line with 2 other training operations"
    assert table.next_turns(64, lane=LANE) == [turn]


def test_a_running_sample_is_marked_and_a_waiting_one_is_returned_once(table: OperationTable) -> None:
    table.add(sample("running"), 0.0)
    running = table.start_sample(LANE, "tiny")
    table.add(sample("waiting"), 0.0)
    assert table.cancel("running") is None
    assert running is not None
    assert running.cancelled
    waiting = table.cancel("waiting")
    assert waiting is not None
    assert table.cancel("waiting") is None
    assert table.start_sample(LANE, "tiny") is None


def custom(name: str, run_id: str, owner: str, loss: str | None = "digest") -> Operation:
    return Operation(name, owner, "tiny", run_id, 1, Kind.FORWARD_BACKWARD, 5, loss=loss, num_datums=1)


def test_an_interrupted_turn_of_a_delayed_user_lets_others_pass(table: OperationTable) -> None:
    for run_id in RUNS:
        table.resume_run(run_id, 1, [], [], 0.0)
    table.add(custom("r1-1", "r1", "ada"), 0.0)
    (interrupted,) = table.next_turns(64, lane=LANE)
    table.requeue([interrupted], [])
    assert not table.has_training(delayed={"ada"})
    table.add(custom("r3-1", "r3", "bob", loss=None), 0.0)
    assert table.has_training(delayed={"ada"})
    (turn,) = table.next_turns(64, delayed={"ada"}, lane=LANE)
    assert [each.request_id for each in turn] == ["r3-1"]
    assert not table.next_turns(64, delayed={"ada"}, lane=LANE)
    assert table.next_turns(64, lane=LANE) == [interrupted]


def test_passes_with_an_unknown_loss_have_a_turn_of_their_own_and_cheap_ones_share(
    table: OperationTable,
) -> None:
    for run_id in RUNS:
        table.resume_run(run_id, 1, [], [], 0.0)
    for run_id in RUNS:
        table.add(custom(f"{run_id}-1", run_id, OWNERS[run_id]), 0.0)
    (first,) = table.next_turns(2048, lane=LANE)
    assert len(first) == 1
    first[0].outcome, first[0].ran, first[0].loss_tokens = DONE, True, 1
    table.compute(first)
    (second,) = table.next_turns(2048, lane=LANE)
    assert len(second) == 2


def test_a_user_pays_for_what_its_custom_loss_has_cost(table: OperationTable) -> None:
    for run_id in ("r1", "r3"):
        table.resume_run(run_id, 1, [], [], 0.0)
        for seq_id in range(1, 8):
            owner, loss = OWNERS[run_id], "digest" if run_id == "r1" else None
            made = Operation(
                f"{run_id}-{seq_id}",
                owner,
                "tiny",
                run_id,
                seq_id,
                Kind.FORWARD_BACKWARD,
                5,
                loss=loss,
                num_datums=1,
            )
            table.add(made, 0.0)
    order = []
    while turns := table.next_turns(1, lane=LANE):
        for each in turns[0]:
            each.outcome, each.ran, each.loss_tokens = DONE, True, 1000 if each.loss else 0
            order.append(each.owner)
        table.compute(turns[0])
    assert order.index("ada") <= 1
    assert order[2:8] == ["bob"] * 6


def parked(number: int, owner: str = "ada", size: int = 10) -> Operation:
    made = Operation(f"req-{number}", owner, "tiny", "r1", number, Kind.OPTIM_STEP, 0)
    made.request, made.num_bytes, made.held_bytes = REQUEST, size, size
    return made


def test_bytes_over_a_users_budget_are_rejected_and_what_others_wait_for_is_not(
    table: OperationTable,
) -> None:
    table.resume_run("r1", 1, [], [], 0.0)
    for number in (2, 3):
        table.check_room("ada", 30, "r1", number)
        table.add(parked(number, size=30), 0.0)
    with pytest.raises(OverQuota, match="have 60 bytes, this one has 1, and 60 is the limit per user"):
        table.check_room("ada", 1, "r1", 4)
    table.check_room("bob", 30)
    table.check_room("ada", 30, "r1", 1)
    with pytest.raises(OverQuota, match="this one has 31"):
        table.check_room("ada", 31, "r1", 1)


def test_bytes_over_the_budget_of_all_users_are_rejected_for_now(table: OperationTable) -> None:
    table.add(Operation("a", "ada", "tiny", "sampler", 0, Kind.SAMPLE, 5, num_bytes=60), 0.0)
    table.add(Operation("b", "bob", "tiny", "sampler", 0, Kind.SAMPLE, 5, num_bytes=40), 0.0)
    with pytest.raises(
        Busy, match="of all users have 100 bytes, this one has 1, and 100 is this server's limit"
    ) as raised:
        table.check_room("eve", 1)
    assert not isinstance(raised.value, OverQuota)


def test_an_operation_larger_than_every_budget_is_accepted_when_nothing_waits(table: OperationTable) -> None:
    table.check_room("ada", 10**9)


def test_a_request_that_can_run_takes_the_memory_of_those_that_cannot(table: OperationTable) -> None:
    table.resume_run("r1", 1, [], [], 0.0)
    waiting = [parked(number) for number in (2, 3, 4, 5)]
    for each in waiting:
        table.add(each, 0.0)
    assert table.held_bytes == 40
    first = parked(1, size=15)
    table.add(first, 0.0)
    assert first.request is REQUEST
    assert table.held_bytes <= 40


def test_nothing_of_a_run_runs_before_its_interrupted_operation(table: OperationTable) -> None:
    table.resume_run("r1", 1, [], [], 0.0)
    for seq_id in (1, 2):
        table.add(Operation(f"r1-{seq_id}", OWNERS["r1"], "tiny", "r1", seq_id, Kind.OPTIM_STEP, 0), 0.0)
    (turn,) = table.next_turns(64, lane=LANE)
    table.requeue([turn], [])
    assert table.ready_runs() == ["r1"]
    assert not table.has_training(may_run=lambda operation: operation.seq_id == 2)
    assert not table.next_turns(64, may_run=lambda operation: operation.seq_id == 2, lane=LANE)
    assert table.next_turns(64, lane=LANE) == [turn]


def test_users_of_a_slow_lane_share_its_tokens_however_fast_another_lane_is(table: OperationTable) -> None:
    tokens = {"large": 100, "small": 20, "fast": 100}
    seq_ids = dict.fromkeys(tokens, 0)

    def add(run_id: str) -> None:
        seq_ids[run_id] += 1
        number = seq_ids[run_id]
        name = f"{run_id}-{number}"
        table.add(Operation(name, run_id, "tiny", run_id, number, Kind.FORWARD_BACKWARD, tokens[run_id]), 0.0)

    for run_id in tokens:
        table.resume_run(run_id, 1, [], [], 0.0)
        for _ in range(60):
            add(run_id)
    served = Counter[str]()
    for _ in range(60):
        for lane, runs in (("trainer-0", {"fast"}), ("trainer-1", {"large", "small"})):
            (turn,) = table.next_turns(20, lane=lane, among=runs)
            for operation in turn:
                served[operation.owner] += operation.num_tokens
    assert served["large"] == pytest.approx(served["small"], abs=100)


def test_a_lane_only_gets_its_own_runs_and_interrupted_turns(table: OperationTable) -> None:
    for run_id in ("r1", "r2"):
        table.resume_run(run_id, 1, [], [], 0.0)
        table.add(Operation(f"{run_id}-1", "ada", "tiny", run_id, 1, Kind.FORWARD_BACKWARD, 5), 0.0)
    assert table.take_new_ready() == ["r1", "r2"]
    assert table.take_new_ready() == []
    assert not table.has_training(among={"r3"})
    (turn,) = table.next_turns(64, lane="trainer-0", among={"r1"})
    assert [each.run_id for each in turn] == ["r1"]
    table.requeue([turn], [])
    assert table.take_new_ready() == ["r2"], "after a lost lane all that wait are placed"
    assert table.ready_runs({"r2"}) == ["r2"]
    assert table.has_training(among={"r1"})
    assert [
        each.run_id for turn in table.next_turns(64, lane="trainer-1", among={"r2"}) for each in turn
    ] == ["r2"]


def test_operations_start_by_the_clock_of_the_table() -> None:
    table = OperationTable(gap_timeout_s=GAP_S, budgets=BUDGETS, on_ready=lambda: None, clock=lambda: 42.0)
    table.add(sample("one"), 0.0)
    started = table.start_sample(LANE, "tiny")
    assert started is not None
    assert started.started_at == 42.0
