"""The next training turns: one packed pass of many operations, or operations that stand alone.

``forward`` and ``forward_backward`` of all runs of one base model share a pass, up to a token budget, which also counts what
their custom losses cost, and the tokens that passes of one run share only once; within a run they join in order, until its
first operation of another kind. A pass whose custom loss is costly has a turn of its own: it may be suspended, and nobody else
should wait with it. So has one that is large enough to be cut into shards: its numbers depend on no other. Everything else (optim_step, save, load) runs alone: it is a barrier for its own run only. Optimizer steps
are short, so those of several runs are dispatched and committed together, each in a turn of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from collections.abc import Set as AbstractSet
from operator import attrgetter
from typing import TypeAlias

from tinkex.engine.operation import Kind, Operation
from tinkex.engine.scheduler.fairness import FairShare, Round
from tinkex.engine.scheduler.queue import Queue
from tinkex.engine.scheduler.run_limits import NO_LIMITS, RunLimits, RunMembers
from tinkex.engine.scheduler.shared_tokens import SharedTokens

BARRIER_COST = 16
"""What an operation without tokens costs its user: little, but not nothing, or a loop of them would never yield."""

MAX_SHARED_LOSS_COST = 512
"""What a custom loss may cost, in tokens, for its pass to share a turn."""

MAX_STEPS = 16
"""How many optimizer steps are dispatched together; whatever arrives next waits for them."""

Turn: TypeAlias = tuple[Operation, ...]
"""Operations that run together: passes of one base model, or a single barrier."""
MayRun: TypeAlias = Callable[[Operation], bool]


def always(operation: Operation) -> bool:
    """Let every operation run."""
    del operation
    return True


def next_turns(
    queue: Queue,
    shares: FairShare[str],
    token_budget: int,
    cost: Callable[[Operation], int] = attrgetter("tokens_computed"),
    delayed: Container[str] = (),
    limits: RunLimits = NO_LIMITS,
    may_run: MayRun = always,
    *,
    among: AbstractSet[str] | None = None,
    share_prefixes: bool = False,
    max_shared_tokens: int | None = None,
) -> Sequence[Turn]:
    """Take from the queue what runs next: one pass, one barrier, or optimizer steps of several runs; nothing if nothing is ready.

    Operations of ``delayed`` users, and of a run those from the first that not ``may_run``, stay in the queue, and so do runs
    that are not ``among`` those given; ``cost`` is what an operation costs, in tokens. With ``share_prefixes``, those that it shares
    with an operation of its run in the same pass are not counted again. An operation that computes more than ``max_shared_tokens``
    shares its turn with no other.
    The user served least has the first choice, and every further place goes to the user served least by then. An operation
    larger than the budget runs in a pass of its own. What is taken needs no more runs in memory than ``limits`` allow.
    """
    lines: dict[str, list[str]] = {}
    for run_id in queue.runs(delayed, among):
        operation = queue.first(run_id)
        if operation is not None and may_run(operation):
            lines.setdefault(operation.owner, []).append(run_id)
    if not lines:
        return ()
    shares.waiting(lines.keys())
    first = queue.first(lines[shares.pick(lines)][0])
    assert first is not None
    members = RunMembers(limits)
    if first.kind is Kind.OPTIM_STEP:
        return [(step,) for step in _take_steps(queue, shares, lines, members)]
    if not first.kind.packs:
        _take(queue, shares, first, cost(first))
        return [(first,)]

    chosen: list[Operation] = []
    shared = SharedTokens()
    room = token_budget

    def added_cost(operation: Operation) -> int:
        return cost(operation) - (shared.saved_by(operation) if share_prefixes else 0)

    def is_alone(operation: Operation) -> bool:
        is_cut = (
            max_shared_tokens is not None
            and operation.loss is None
            and operation.tokens_computed > max_shared_tokens
        )
        return is_cut or _is_alone(operation, cost)

    def joins(operation: Operation | None) -> bool:
        return (
            operation is not None
            and operation.kind.packs
            and operation.model == first.model
            and may_run(operation)
            and (not chosen or (not is_alone(operation) and added_cost(operation) <= room))
            and members.admits(operation.run_id)
        )

    order = Round(shares, lines)
    while (owner := order.next()) is not None:
        # A user none of whose runs can join now has none that can later: the room only shrinks.
        operation = next((each for run in lines[owner] if joins(each := queue.first(run))), None)
        if operation is None:
            continue
        shares.pick([owner])
        tokens = added_cost(operation)
        _take(queue, shares, operation, tokens)
        chosen.append(operation)
        if share_prefixes:
            shared.add(operation)
        members.add(operation.run_id)
        room -= tokens
        if is_alone(operation):
            break
        order.again()
    return [tuple(chosen)]


def _take_steps(
    queue: Queue,
    shares: FairShare[str],
    lines: Mapping[str, Sequence[str]],
    members: RunMembers,
) -> Sequence[Operation]:
    """Take optimizer steps that are next in their runs, one of each run."""
    steps: list[Operation] = []
    waiting = {
        owner: deque(
            step for run in runs if (step := queue.first(run)) is not None and step.kind is Kind.OPTIM_STEP
        )
        for owner, runs in lines.items()
    }
    order = Round(shares, waiting)
    while len(steps) < MAX_STEPS and (owner := order.next()) is not None:
        if not waiting[owner]:
            continue
        shares.pick([owner])
        step = waiting[owner].popleft()
        if members.admits(step.run_id):
            members.add(step.run_id)
            _take(queue, shares, step, step.num_tokens)
            steps.append(step)
        order.again()
    return steps


def _is_alone(operation: Operation, cost: Callable[[Operation], int]) -> bool:
    """Whether a pass has a turn of its own."""
    return operation.loss is not None and cost(operation) - operation.tokens_computed > MAX_SHARED_LOSS_COST


def _take(queue: Queue, shares: FairShare[str], operation: Operation, tokens: int) -> None:
    queue.take(operation)
    operation.charged = max(tokens, BARRIER_COST)
    shares.charge(operation.owner, operation.charged)
