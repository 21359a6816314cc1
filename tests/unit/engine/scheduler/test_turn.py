from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tinkex.engine.lanes.interface import PassJob
from tinkex.engine.operation import Kind, Operation
from tinkex.engine.scheduler import FairShare, Queue, RunLimits, next_turns
from tinkex.engine.scheduler.shared_tokens import SharedTokens
from tinkex.engine.scheduler.turn import MAX_STEPS
from tinkex.engine.trainer.examples import Example
from tinkex.engine.trainer.prefixes import count_distinct

SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=1, max_size=6)


def operation(
    run: str,
    seq_id: int,
    kind: Kind = Kind.FORWARD_BACKWARD,
    tokens: int = 10,
    owner: str = "",
    model: str = "base",
) -> Operation:
    return Operation(f"{run}#{seq_id}", owner or run, model, run, seq_id, kind, tokens)


def queue_of(*operations: Operation) -> Queue:
    queue = Queue(300.0)
    for item in operations:
        queue.open(item.run_id)
        queue.put(item, now=0.0)
    return queue


def plans(queue: Queue, budget: int) -> list[list[str]]:
    turns, out = FairShare[str](), []
    while taken := next_turns(queue, turns, budget):
        out += [[each.request_id for each in turn] for turn in taken]
    return out


def test_passes_of_different_runs_are_merged_up_to_the_token_budget() -> None:
    queue = queue_of(operation("a", 1), operation("b", 1), operation("c", 1))
    assert plans(queue, budget=20) == [["a#1", "b#1"], ["c#1"]]


def test_consecutive_passes_of_one_run_are_merged() -> None:
    queue = queue_of(operation("a", 1), operation("a", 2, Kind.FORWARD), operation("a", 3))
    assert plans(queue, budget=100) == [["a#1", "a#2", "a#3"]]


def test_an_optimizer_step_is_a_barrier_for_its_own_run_only() -> None:
    queue = queue_of(
        operation("a", 1),
        operation("a", 2, Kind.OPTIM_STEP, 0),
        operation("a", 3),
        operation("b", 1),
        operation("b", 2),
    )
    (first,) = next_turns(queue, FairShare[str](), 100)
    assert first[0].kind.packs
    assert {each.request_id for each in first} == {"a#1", "b#1", "b#2"}
    assert plans(queue, 100) == [["a#2"], ["a#3"]]


def test_an_operation_larger_than_the_budget_runs_in_a_pass_of_its_own() -> None:
    queue = queue_of(operation("a", 1, tokens=500), operation("b", 1))
    assert sorted(plans(queue, budget=100)) == [["a#1"], ["b#1"]]


def test_runs_of_different_base_models_never_share_a_pass() -> None:
    queue = queue_of(operation("a", 1, model="small"), operation("b", 1, model="large"))
    assert sorted(plans(queue, budget=100)) == [["a#1"], ["b#1"]]


def test_a_user_with_a_long_queue_does_not_hold_up_another() -> None:
    queue = queue_of(
        *(operation("greedy", n, tokens=50) for n in range(1, 21)), operation("modest", 1, tokens=50)
    )
    order = [name for plan in plans(queue, budget=100) for name in plan]
    assert order.index("modest#1") <= 1


def test_a_loop_of_barriers_yields_to_other_users() -> None:
    queue = queue_of(
        *(operation("stepper", n, Kind.OPTIM_STEP, 0) for n in range(1, 21)), operation("other", 1, tokens=10)
    )
    order = [name for plan in plans(queue, budget=100) for name in plan]
    assert order.index("other#1") <= 1


def test_without_ready_operations_there_is_no_plan() -> None:
    assert not next_turns(Queue(300.0), FairShare[str](), 100)


def test_a_save_stands_alone() -> None:
    queue = queue_of(operation("a", 1, Kind.SAVE, 0), operation("b", 1, Kind.SAVE, 0))
    (plan,) = next_turns(queue, FairShare[str](), 100)
    assert [each.kind for each in plan] == [Kind.SAVE]


def test_optimizer_steps_of_several_runs_are_taken_together_each_in_a_turn_of_its_own() -> None:
    steps = [operation(run, 1, Kind.OPTIM_STEP, 0) for run in "abc"]
    queue = queue_of(*steps, operation("a", 2, Kind.OPTIM_STEP, 0), operation("d", 1, Kind.SAVE, 0))
    turns = next_turns(queue, FairShare[str](), 100)
    assert sorted(turns, key=lambda turn: turn[0].run_id) == [(step,) for step in steps]


def test_the_number_of_steps_taken_together_is_bounded_and_shared_by_users() -> None:
    greedy = [operation(f"g{n}", 1, Kind.OPTIM_STEP, 0, owner="greedy") for n in range(2 * MAX_STEPS)]
    queue = queue_of(*greedy, operation("modest", 1, Kind.OPTIM_STEP, 0))
    taken = [turn[0].owner for turn in next_turns(queue, FairShare[str](), 100)]
    assert len(taken) == MAX_STEPS
    assert "modest" in taken[:2]


def test_what_a_pass_costs_besides_its_tokens_counts_toward_the_budget() -> None:
    costs = {"a#1": 90, "b#1": 20, "c#1": 70}
    queue = queue_of(operation("a", 1), operation("b", 1), operation("c", 1))
    turns, shares = [], FairShare[str]()
    while planned := next_turns(queue, shares, 100, cost=lambda each: costs[each.request_id]):
        turns += [[each.request_id for each in turn] for turn in planned]
    assert turns == [["a#1"], ["b#1", "c#1"]]


def test_a_user_is_charged_what_its_passes_cost() -> None:
    queue = queue_of(
        *(operation("costly", n) for n in range(1, 4)), *(operation("cheap", n) for n in range(1, 20))
    )
    shares, order = FairShare[str](), []
    while turns := next_turns(queue, shares, 1, cost=lambda each: 100 if each.owner == "costly" else 10):
        order += [each.owner for turn in turns for each in turn]
    assert order[:12].count("costly") == 2, "it is served as much as the other, not as often"


def test_operations_of_delayed_users_stay_in_the_queue() -> None:
    queue = queue_of(operation("a", 1), operation("b", 1))
    shares = FairShare[str]()
    (turn,) = next_turns(queue, shares, 100, delayed={"a"})
    assert [each.request_id for each in turn] == ["b#1"]
    assert not next_turns(queue, shares, 100, delayed={"a"})
    (later,) = next_turns(queue, shares, 100)
    assert [each.request_id for each in later] == ["a#1"]


def test_a_pass_and_dispatched_steps_need_no_more_runs_than_fit_in_memory() -> None:
    limits = RunLimits(max_bytes=100, sizes={"a": 40, "b": 70, "c": 60, "d": 200})
    passes = queue_of(*(operation(run, n) for run in "abcd" for n in (1, 2)))
    taken = []
    while turns := next_turns(passes, FairShare[str](), 1000, limits=limits):
        taken.append({each.run_id for turn in turns for each in turn})
    assert taken == [{"a", "c"}, {"b"}, {"d"}]
    steps = queue_of(*(operation(run, 1, Kind.OPTIM_STEP, 0) for run in "abcd"))
    shares, numbers = FairShare[str](), []
    while turns := next_turns(steps, shares, 1000, limits=RunLimits(max_runs=3)):
        numbers.append(len(turns))
    assert numbers == [3, 1]


def passing(
    run: str, seq_id: int, *sequences: Sequence[int], kind: Kind = Kind.FORWARD_BACKWARD
) -> Operation:
    """A pass over these datums."""
    made = operation(run, seq_id, kind, tokens=sum(map(len, sequences)))
    arrays = [np.array(sequence) for sequence in sequences]
    examples = [Example(tokens_N, tokens_N, {}, (len(tokens_N),)) for tokens_N in arrays]
    made.job = PassJob(run, "cross_entropy", examples, backward=kind is Kind.FORWARD_BACKWARD)
    made.tokens_computed = count_distinct(arrays)
    return made


def chunk(run: str, seq_id: int, *answers: int, kind: Kind = Kind.FORWARD_BACKWARD) -> Operation:
    """A pass over answers to one prompt of 50 tokens, whose own ten tokens are counted up from ``answers``."""
    return passing(run, seq_id, *([*range(50), *range(start, start + 10)] for start in answers), kind=kind)


def sharing_plans(queue: Queue, budget: int, *, share_prefixes: bool) -> list[list[str]]:
    shares, out = FairShare[str](), []
    while taken := next_turns(queue, shares, budget, share_prefixes=share_prefixes):
        out += [[each.request_id for each in turn] for turn in taken]
    return out


def test_chunks_that_share_a_prompt_count_it_once_toward_the_budget() -> None:
    chunks = [chunk("a", n, 100 * n, 100 * n + 50) for n in range(1, 4)]
    assert sharing_plans(queue_of(*chunks), 110, share_prefixes=True) == [["a#1", "a#2", "a#3"]]
    assert [each.charged for each in chunks] == [70, 20, 20]
    again = [chunk("a", n, 100 * n, 100 * n + 50) for n in range(1, 4)]
    assert sharing_plans(queue_of(*again), 110, share_prefixes=False) == [["a#1"], ["a#2"], ["a#3"]]


def test_runs_and_passes_without_gradients_share_no_tokens() -> None:
    queue = queue_of(chunk("a", 1, 100), chunk("b", 1, 100), chunk("a", 2, 100, kind=Kind.FORWARD))
    assert sharing_plans(queue, 130, share_prefixes=True) == [["a#1", "b#1"], ["a#2"]]


def test_thousands_of_short_passes_of_one_run_are_planned_together() -> None:
    # Comparing all datums again for each operation would take minutes.
    queue = queue_of(*(passing("a", n, [n, n + 1]) for n in range(1, 3001)))
    assert [len(taken) for taken in sharing_plans(queue, 6000, share_prefixes=True)] == [3000]


@given(SEQUENCES, SEQUENCES)
def test_an_operation_costs_what_a_pass_over_both_computes_more(
    one: list[list[int]], other: list[list[int]]
) -> None:
    # Every token eight times, so that no prefix is too short to be shared.
    first, second = ([np.repeat(tokens, 8).tolist() for tokens in sequences] for sequences in (one, other))
    added, joining, both = passing("a", 1, *first), passing("a", 2, *second), passing("a", 1, *first, *second)
    shared = SharedTokens()
    shared.add(added)
    expected = added.tokens_computed + joining.tokens_computed - both.tokens_computed
    assert shared.saved_by(joining) == expected


def test_a_pass_whose_datums_are_on_disk_counts_in_full() -> None:
    waiting = chunk("a", 2, 200)
    waiting.job = None
    assert sharing_plans(queue_of(chunk("a", 1, 100), waiting), 110, share_prefixes=True) == [
        ["a#1"],
        ["a#2"],
    ]


def test_a_pass_with_a_costly_loss_has_a_turn_of_its_own() -> None:
    def cost(each: Operation) -> int:
        return each.num_tokens + (600 if each.loss == "costly" else 100 if each.loss else 0)

    def with_loss(run: str, loss: str) -> Operation:
        made = operation(run, 1)
        made.loss = loss
        return made

    queue = queue_of(operation("a", 1), with_loss("b", "costly"), with_loss("c", "cheap"), operation("d", 1))
    shares, taken = FairShare[str](), []
    while turns := next_turns(queue, shares, 2048, cost):
        taken += [{each.run_id for each in turn} for turn in turns]
    assert sorted(taken, key=len) == [{"b"}, {"a", "c", "d"}]


def test_operations_that_may_not_run_stay_with_all_that_follow_them_in_their_run() -> None:
    queue = queue_of(operation("a", 1), operation("a", 2), operation("a", 3), operation("b", 1))
    (turn,) = next_turns(queue, FairShare[str](), 100, may_run=lambda each: each.request_id != "a#2")
    assert {each.request_id for each in turn} == {"a#1", "b#1"}
    assert not next_turns(queue, FairShare[str](), 100, may_run=lambda each: each.request_id != "a#2")
    assert plans(queue, 100) == [["a#2", "a#3"]]


def test_planning_looks_only_at_the_runs_it_may_take() -> None:
    queue = queue_of(*(operation(f"r{number}", 1) for number in range(200)))
    seen = set[str]()

    def may_run(each: Operation) -> bool:
        seen.add(each.run_id)
        return True

    (turn,) = next_turns(queue, FairShare[str](), 100, may_run=may_run, among={"r7", "r9", "elsewhere"})
    assert {each.run_id for each in turn} == seen == {"r7", "r9"}
