from __future__ import annotations

from tinkex.engine.scheduler import Barrier, FairShare, Kind, Pass, Queue, Work, next_plan


def work(
    run: str,
    seq_id: int,
    kind: Kind = Kind.FORWARD_BACKWARD,
    tokens: int = 10,
    tenant: str = "",
    group: str = "base",
) -> Work[None]:
    return Work(f"{run}#{seq_id}", tenant or run, group, run, seq_id, kind, tokens, None)


def queue_of(*works: Work[None]) -> Queue[None]:
    queue = Queue[None](300.0)
    for item in works:
        queue.open(item.run_id)
        queue.put(item, now=0.0)
    return queue


def plans(queue: Queue[None], budget: int) -> list[list[str]]:
    turns, out = FairShare[str](), []
    while (plan := next_plan(queue, turns, budget)) is not None:
        out.append([w.request_id for w in (plan.works if isinstance(plan, Pass) else (plan.work,))])
    return out


def test_passes_of_different_runs_are_merged_up_to_the_token_budget() -> None:
    queue = queue_of(work("a", 1), work("b", 1), work("c", 1))
    assert plans(queue, budget=20) == [["a#1", "b#1"], ["c#1"]]


def test_consecutive_passes_of_one_run_are_merged() -> None:
    queue = queue_of(work("a", 1), work("a", 2, Kind.FORWARD), work("a", 3))
    assert plans(queue, budget=100) == [["a#1", "a#2", "a#3"]]


def test_an_optimizer_step_is_a_barrier_for_its_own_run_only() -> None:
    queue = queue_of(work("a", 1), work("a", 2, Kind.OPTIM_STEP, 0), work("a", 3), work("b", 1), work("b", 2))
    first = next_plan(queue, FairShare[str](), 100)
    assert isinstance(first, Pass)
    assert {w.request_id for w in first.works} == {"a#1", "b#1", "b#2"}
    assert plans(queue, 100) == [["a#2"], ["a#3"]]


def test_an_operation_larger_than_the_budget_runs_in_a_pass_of_its_own() -> None:
    queue = queue_of(work("a", 1, tokens=500), work("b", 1))
    assert sorted(plans(queue, budget=100)) == [["a#1"], ["b#1"]]


def test_runs_of_different_base_models_never_share_a_pass() -> None:
    queue = queue_of(work("a", 1, group="small"), work("b", 1, group="large"))
    assert sorted(plans(queue, budget=100)) == [["a#1"], ["b#1"]]


def test_a_user_with_a_long_queue_does_not_hold_up_another() -> None:
    queue = queue_of(*(work("greedy", n, tokens=50) for n in range(1, 21)), work("modest", 1, tokens=50))
    order = [name for plan in plans(queue, budget=100) for name in plan]
    assert order.index("modest#1") <= 1


def test_a_loop_of_barriers_yields_to_other_users() -> None:
    queue = queue_of(
        *(work("stepper", n, Kind.OPTIM_STEP, 0) for n in range(1, 21)), work("other", 1, tokens=10)
    )
    order = [name for plan in plans(queue, budget=100) for name in plan]
    assert order.index("other#1") <= 1


def test_nothing_ready_is_no_plan() -> None:
    assert next_plan(Queue[None](300.0), FairShare[str](), 100) is None


def test_a_save_stands_alone() -> None:
    plan = next_plan(queue_of(work("a", 1, Kind.SAVE, 0)), FairShare[str](), 100)
    assert isinstance(plan, Barrier)
    assert plan.work.kind is Kind.SAVE
