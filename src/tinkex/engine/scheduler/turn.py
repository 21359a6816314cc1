"""The next training turn: one packed pass of many operations, or one operation that stands alone.

``forward`` and ``forward_backward`` of all runs of one base model share a pass, up to a token budget; within a run they
join in order, until its first operation of another kind. Everything else (optim_step, save, load) runs alone: it is
a barrier for its own run only.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from tinkex.engine.operation import Operation
from tinkex.engine.scheduler.fairness import FairShare
from tinkex.engine.scheduler.queue import Queue

BARRIER_COST = 16
"""What an operation without tokens costs its user: little, but not nothing, or a loop of them would never yield."""


@dataclass(frozen=True, eq=False)
class Turn:
    """Operations that run together: passes of one base model, or a single barrier."""

    operations: tuple[Operation, ...]

    @property
    def is_pass(self) -> bool:
        """Whether this is a packed pass."""
        return self.operations[0].kind.packs


def next_turn(queue: Queue, shares: FairShare[str], token_budget: int) -> Turn | None:
    """Take from the queue what runs next, or None if nothing is ready.

    The user served least has the first choice, and every further place in a pass goes to the user served least by
    then. An operation larger than the budget runs in a pass of its own.
    """
    lines: dict[str, deque[deque[Operation]]] = {}
    for run_id in list(queue.runs()):
        ready = deque(queue.ready(run_id))
        lines.setdefault(ready[0].owner, deque()).append(ready)
    if not lines:
        return None
    shares.waiting(lines.keys())
    first = lines[shares.pick(lines)][0][0]
    if not first.kind.packs:
        _take(queue, shares, first)
        return Turn((first,))

    chosen: list[Operation] = []
    room = token_budget
    while True:
        eligible = {
            owner: line
            for owner, runs in lines.items()
            if (line := _joining(runs, first.model, room, is_first=not chosen))
        }
        if not eligible:
            return Turn(tuple(chosen))
        operation = eligible[shares.pick(eligible)].popleft()
        _take(queue, shares, operation)
        chosen.append(operation)
        room -= operation.num_tokens


def _joining(
    runs: deque[deque[Operation]], model: str, room: int, *, is_first: bool
) -> deque[Operation] | None:
    """The first run of a user whose next operation can join the pass."""
    for line in runs:
        if (
            line
            and line[0].kind.packs
            and line[0].model == model
            and (line[0].num_tokens <= room or is_first)
        ):
            return line
    return None


def _take(queue: Queue, shares: FairShare[str], operation: Operation) -> None:
    queue.take(operation)
    shares.charge(operation.owner, max(operation.num_tokens, BARRIER_COST))
