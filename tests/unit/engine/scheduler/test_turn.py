from __future__ import annotations

from tinkex.engine.operation import Kind, Operation
from tinkex.engine.scheduler import FairShare, Queue, next_turn


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
    while (turn := next_turn(queue, turns, budget)) is not None:
        out.append([each.request_id for each in turn.operations])
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
    first = next_turn(queue, FairShare[str](), 100)
    assert first is not None
    assert first.is_pass
    assert {each.request_id for each in first.operations} == {"a#1", "b#1", "b#2"}
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


def test_nothing_ready_is_no_plan() -> None:
    assert next_turn(Queue(300.0), FairShare[str](), 100) is None


def test_a_save_stands_alone() -> None:
    plan = next_turn(queue_of(operation("a", 1, Kind.SAVE, 0)), FairShare[str](), 100)
    assert plan is not None
    assert not plan.is_pass
    assert [each.kind for each in plan.operations] == [Kind.SAVE]
