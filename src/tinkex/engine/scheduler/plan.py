"""The next thing to run: one packed pass of many operations, or one operation that stands alone.

``forward`` and ``forward_backward`` of all runs of one base model share a pass, up to a token budget; within a run they
join in order, until its first operation of another kind. Everything else (optim_step, save, load) runs alone: it is
a barrier for its own run only.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from tinkex.engine.scheduler.fairness import FairShare
from tinkex.engine.scheduler.queue import Queue
from tinkex.engine.scheduler.work import Work

Request = TypeVar("Request")

BARRIER_COST = 16
"""What an operation without tokens costs its user: little, but not nothing, or a loop of them would never yield."""


@dataclass(frozen=True)
class Pass(Generic[Request]):
    """Forward and backward operations of one base model, to run together."""

    works: tuple[Work[Request], ...]


@dataclass(frozen=True)
class Barrier(Generic[Request]):
    """One operation, to run alone."""

    work: Work[Request]


Plan: TypeAlias = Pass[Request] | Barrier[Request]


def next_plan(queue: Queue[Request], turns: FairShare[str], token_budget: int) -> Plan[Request] | None:
    """Take from the queue what runs next, or None if nothing is ready.

    The user served least has the first choice, and every further place in a pass goes to the user served least by
    then. An operation larger than the budget runs in a pass of its own.
    """
    lines: dict[str, deque[deque[Work[Request]]]] = {}
    for run_id in list(queue.runs()):
        ready = deque(queue.ready(run_id))
        lines.setdefault(ready[0].tenant, deque()).append(ready)
    if not lines:
        return None
    turns.waiting(lines.keys())
    first = lines[turns.pick(lines)][0][0]
    if not first.kind.packs:
        _take(queue, turns, first)
        return Barrier(first)

    works: list[Work[Request]] = []
    room = token_budget
    while True:
        eligible = {
            tenant: line
            for tenant, runs in lines.items()
            if (line := _joining(runs, first.group, room, works))
        }
        if not eligible:
            return Pass(tuple(works))
        line = eligible[turns.pick(eligible)]
        work = line.popleft()
        _take(queue, turns, work)
        works.append(work)
        room -= work.num_tokens


def _joining(
    runs: deque[deque[Work[Request]]], group: str, room: int, works: list[Work[Request]]
) -> deque[Work[Request]] | None:
    """The first run of a user whose next operation can join the pass."""
    for line in runs:
        if (
            line
            and line[0].kind.packs
            and line[0].group == group
            and (line[0].num_tokens <= room or not works)
        ):
            return line
    return None


def _take(queue: Queue[Request], turns: FairShare[str], work: Work[Request]) -> None:
    queue.take(work)
    turns.charge(work.tenant, max(work.num_tokens, BARRIER_COST))
