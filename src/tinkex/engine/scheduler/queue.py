"""The operations of every run, in the order of their seq_id, whatever order they arrive in.

Numbers start at 1 (creating the run is 0). Chunks of one call arrive as 2…n and then 1, so an early number is parked until
those before it are there. A number whose submission was refused is used up. A number that never comes holds the later
ones for a bounded time: then they fail, and the run goes on after them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from tinkex.engine.scheduler.work import Kind, Work
from tinkex.errors import InvalidInput

Request = TypeVar("Request")

MOST_AHEAD = 100_000
"""How far a number may be ahead of the next one. Clients count one by one; a number made up would use up all below it."""


@dataclass
class _Line(Generic[Request]):
    """The operations of one run that have not run yet."""

    next_seq: int = 1
    ready: deque[Work[Request]] = field(default_factory=deque)
    parked: dict[int, Work[Request]] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)
    gap_since: float | None = None
    """When operations began to wait for ``next_seq``; None while nothing waits for it."""

    def advance(self, now: float) -> None:
        moved = False
        while True:
            if self.next_seq in self.parked:
                self.ready.append(self.parked.pop(self.next_seq))
            elif self.next_seq in self.refused:
                self.refused.remove(self.next_seq)
            else:
                break
            self.next_seq += 1
            moved = True
        if not self.parked:
            self.gap_since = None
        elif moved or self.gap_since is None:
            self.gap_since = now


@dataclass(frozen=True)
class Missed(Generic[Request]):
    """An operation that waited too long for the number ``missing``."""

    work: Work[Request]
    missing: int


class Queue(Generic[Request]):
    """Work of all runs, ready in order per run.

    >>> from tinkex.engine.scheduler.work import Kind
    >>> def step(seq_id): return Work(f"r{seq_id}", "ada", "base", "run", seq_id, Kind.OPTIM_STEP, 0, None)
    >>> queue = Queue(gap_timeout_s=300)
    >>> queue.open("run")
    >>> queue.put(step(2), now=0.0); queue.ready("run")
    ()
    >>> queue.put(step(1), now=0.0); [work.seq_id for work in queue.ready("run")]
    [1, 2]
    """

    def __init__(self, gap_timeout_s: float) -> None:
        self._gap_timeout_s = gap_timeout_s
        self._lines: dict[str, _Line[Request]] = {}

    def open(self, run_id: str, *, first: Work[Request] | None = None, next_seq: int = 1) -> None:
        """Start a run; ``first`` is the operation that creates it, ``next_seq`` the number it goes on with."""
        line = self._lines.setdefault(run_id, _Line[Request](next_seq))
        if first is not None:
            line.ready.append(first)

    def close(self, run_id: str) -> Sequence[Work[Request]]:
        """End a run; returns what had not run yet."""
        line = self._lines.pop(run_id, None)
        return (
            [*line.ready, *(line.parked[seq_id] for seq_id in sorted(line.parked))]
            if line is not None
            else []
        )

    def expected(self, run_id: str) -> int:
        """The number a caller that does not number its operations gets next."""
        line = self._lines[run_id]
        return max([line.next_seq - 1, *line.parked, *line.refused]) + 1

    def check_turn(self, run_id: str, seq_id: int) -> None:
        """Refuse a number that cannot run any more, and numbers that are none."""
        line = self._lines[run_id]
        if seq_id < 1:
            raise InvalidInput(
                f"seq_id {seq_id} does not exist: the operations of a run are numbered from 1."
            )
        if seq_id < line.next_seq or seq_id in line.refused:
            raise InvalidInput(
                f"seq_id {seq_id} of run {run_id} is used up: an operation under it was refused, or was given up after "
                f"{self._gap_timeout_s:g} s; the next one is {self.expected(run_id)}."
            )
        if seq_id - line.next_seq > MOST_AHEAD:
            raise InvalidInput(
                f"seq_id {seq_id} of run {run_id} is far ahead: the next one is {self.expected(run_id)}. Number operations one "
                "by one."
            )

    def put(self, work: Work[Request], now: float) -> None:
        """Add an operation whose number :meth:`check_turn` has accepted."""
        line = self._lines[work.run_id]
        assert work.seq_id >= line.next_seq, "a number is accepted once"
        assert work.seq_id not in line.parked, "a number is accepted once"
        line.parked[work.seq_id] = work
        line.advance(now)

    def refuse(self, run_id: str, seq_id: int, now: float) -> bool:
        """Use up the number of a refused submission, so that later ones do not wait; says whether it was free."""
        line = self._lines.get(run_id)
        if line is None or seq_id in line.parked or seq_id in line.refused:
            return False
        if not 0 <= seq_id - line.next_seq <= MOST_AHEAD:
            return False
        line.refused.add(seq_id)
        line.advance(now)
        return True

    def ready(self, run_id: str) -> Sequence[Work[Request]]:
        """What can run now, in order."""
        return tuple(self._lines[run_id].ready)

    def runs(self) -> Iterator[str]:
        """The runs that have something ready, longest in the queue first."""
        return (run_id for run_id, line in self._lines.items() if line.ready)

    def take(self, work: Work[Request]) -> None:
        """Remove an operation that is about to run; it is the first of its run."""
        line = self._lines[work.run_id]
        assert line.ready[0] is work, "operations of a run are taken in order"
        line.ready.popleft()
        # A run that was served goes to the end, so that the runs of one user take turns.
        self._lines[work.run_id] = self._lines.pop(work.run_id)

    def waiting_for(self, run_id: str, seq_id: int) -> int | None:
        """The number an operation waits for that has not arrived, or None if none is missing."""
        line = self._lines.get(run_id)
        return line.next_seq if line is not None and seq_id in line.parked else None

    def is_missing(self, run_id: str, seq_id: int) -> bool:
        """Whether operations that have arrived wait for this number."""
        line = self._lines.get(run_id)
        return line is not None and line.gap_since is not None and seq_id == line.next_seq

    def give_up_gaps(self, now: float) -> Sequence[Missed[Request]]:
        """Remove operations that waited too long for a missing number; their runs go on after them."""
        missed: list[Missed[Request]] = []
        for line in self._lines.values():
            if line.gap_since is None or now - line.gap_since < self._gap_timeout_s:
                continue
            missing, last = line.next_seq, max(line.parked)
            waiting = [line.parked[seq_id] for seq_id in sorted(line.parked)]
            # The end of a run builds on nothing before it.
            missed += [Missed(work, missing) for work in waiting if work.kind is not Kind.UNLOAD]
            line.ready.extend(work for work in waiting if work.kind is Kind.UNLOAD)
            line.parked.clear()
            line.refused = {seq_id for seq_id in line.refused if seq_id > last}
            line.next_seq = last + 1
            line.advance(now)
        return missed

    def next_gap_deadline(self) -> float | None:
        """When :meth:`give_up_gaps` will next have something to do."""
        starts = [line.gap_since for line in self._lines.values() if line.gap_since is not None]
        return min(starts) + self._gap_timeout_s if starts else None
