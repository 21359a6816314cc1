"""The training operations of every run, in the order of their numbers, whatever order they arrive in.

Numbers start at 1 (creating the run is 0). Chunks of one call arrive as 2…n and then 1, so an early number is parked until
those before it are here. A number whose submission was rejected is used up. A number that never arrives holds back the later
ones for a bounded time: then they fail, and the run continues after them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import count

from tinkex.engine.operation import Kind, Operation
from tinkex.errors import InvalidInput

MAX_NUMBERS_AHEAD = 100_000
"""How far a number may be ahead of the next one. Clients count one by one; an invented number would use up all below it."""


@dataclass
class _Line:
    """The operations of one run that have not run yet."""

    next_seq: int
    position: int
    """Its place among the runs: one that was served goes to the end, so that the runs of one user take turns."""
    ready: deque[Operation] = field(default_factory=deque)
    parked: dict[int, Operation] = field(default_factory=dict)
    rejected: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class GapTimeout:
    """Operations that waited too long for the number ``missing``, and those that are ready now that it is given up."""

    missing: int
    expired: Sequence[Operation]
    ready: Sequence[Operation]


class Queue:
    """Operations of all runs, ready in order per run.

    >>> def step(seq_id): return Operation(f"r{seq_id}", "ada", "base", "run", seq_id, Kind.OPTIM_STEP, 0)
    >>> queue = Queue(gap_timeout_s=300)
    >>> queue.open("run")
    >>> queue.put(step(2), now=0.0)
    []
    >>> [operation.seq_id for operation in queue.put(step(1), now=0.0)]
    [1, 2]
    """

    def __init__(self, gap_timeout_s: float) -> None:
        self._gap_timeout_s = gap_timeout_s
        self._lines: dict[str, _Line] = {}
        self._positions = count()
        self._ready: set[str] = set()
        """The runs that have something ready."""
        self._gaps: dict[str, float] = {}
        """The runs with a missing number, and since when."""

    def open(self, run_id: str, *, first: Operation | None = None, next_seq: int = 1) -> None:
        """Start a run; ``first`` is the operation that creates it, ``next_seq`` the number it continues with."""
        line = self._lines.get(run_id)
        if line is None:
            line = self._lines[run_id] = _Line(next_seq, next(self._positions))
        if first is not None:
            line.ready.append(first)
            self._ready.add(run_id)

    def close(self, run_id: str) -> Sequence[Operation]:
        """End a run; returns what had not run yet."""
        self._gaps.pop(run_id, None)
        self._ready.discard(run_id)
        line = self._lines.pop(run_id, None)
        if line is None:
            return []
        return [*line.ready, *(line.parked[seq_id] for seq_id in sorted(line.parked))]

    def next_number(self, run_id: str) -> int:
        """The number of the next operation of a caller that does not number its operations."""
        line = self._lines[run_id]
        return max([line.next_seq - 1, *line.parked, *line.rejected]) + 1

    def is_new(self, run_id: str, seq_id: int) -> bool:
        """Whether no operation was ever put or rejected under this number."""
        line = self._lines.get(run_id)
        if line is None or seq_id < line.next_seq:
            return False
        return seq_id not in line.parked and seq_id not in line.rejected

    def check_number(self, run_id: str, seq_id: int) -> None:
        """Raise ``InvalidInput`` for a number that cannot run any more, or is out of range."""
        line = self._lines[run_id]
        if seq_id < 1:
            raise InvalidInput(
                f"seq_id {seq_id} does not exist: the operations of a run are numbered from 1."
            )
        if seq_id < line.next_seq or seq_id in line.rejected:
            raise InvalidInput(
                f"seq_id {seq_id} of run {run_id} is used up: an operation under it was rejected, or timed out after "
                f"{self._gap_timeout_s:g} s; the next one is {self.next_number(run_id)}."
            )
        if seq_id - line.next_seq > MAX_NUMBERS_AHEAD:
            raise InvalidInput(
                f"seq_id {seq_id} of run {run_id} is far ahead: the next one is {self.next_number(run_id)}. Number operations "
                "one by one."
            )

    def put(self, operation: Operation, now: float) -> Sequence[Operation]:
        """Add an operation whose number :meth:`check_number` has accepted; returns those that are ready because of it."""
        line = self._lines[operation.run_id]
        assert operation.seq_id >= line.next_seq, "a number is accepted once"
        assert operation.seq_id not in line.parked, "a number is accepted once"
        line.parked[operation.seq_id] = operation
        return self._advance(operation.run_id, line, now)

    def reject(self, run_id: str, seq_id: int, now: float) -> Sequence[Operation] | None:
        """Use up the number of a rejected submission; returns what is ready because of it, or None if it was not free."""
        line = self._lines.get(run_id)
        if line is None or seq_id in line.parked or seq_id in line.rejected:
            return None
        if not 0 <= seq_id - line.next_seq <= MAX_NUMBERS_AHEAD:
            return None
        line.rejected.add(seq_id)
        return self._advance(run_id, line, now)

    def first(self, run_id: str) -> Operation | None:
        """What a run does next, or None if nothing is ready."""
        line = self._lines.get(run_id)
        return line.ready[0] if line is not None and line.ready else None

    def next_operations(
        self, delayed: Container[str] = (), among: AbstractSet[str] | None = None
    ) -> Iterator[Operation]:
        """What is ready first in every run, in no order, of runs ``among`` these, without those of ``delayed`` users."""
        ready = self._ready if among is None else self._ready & among
        firsts = (self._lines[run_id].ready[0] for run_id in ready)
        return (first for first in firsts if first.owner not in delayed)

    def runs(self, delayed: Container[str] = (), among: AbstractSet[str] | None = None) -> Sequence[str]:
        """The runs that have something ready, longest in the queue first; of those, and of users, as in :meth:`next_operations`."""
        found = [operation.run_id for operation in self.next_operations(delayed, among)]
        return sorted(found, key=lambda run_id: self._lines[run_id].position)

    def take(self, operation: Operation) -> None:
        """Remove an operation that is about to run; it is the first of its run."""
        line = self._lines[operation.run_id]
        assert line.ready[0] is operation, "operations of a run are taken in order"
        line.ready.popleft()
        line.position = next(self._positions)
        if not line.ready:
            self._ready.discard(operation.run_id)

    def missing_number(self, run_id: str, seq_id: int) -> int | None:
        """The number an operation waits for that has not arrived, or None if none is missing."""
        line = self._lines.get(run_id)
        return line.next_seq if line is not None and seq_id in line.parked else None

    def is_missing(self, run_id: str, seq_id: int) -> bool:
        """Whether operations that have arrived wait for this number."""
        return run_id in self._gaps and seq_id == self._lines[run_id].next_seq

    def expire_gaps(self, now: float) -> Sequence[GapTimeout]:
        """Remove operations that waited too long for a missing number; their runs continue after them."""
        timeouts: list[GapTimeout] = []
        for run_id, since in list(self._gaps.items()):
            if now - since < self._gap_timeout_s:
                continue
            line = self._lines[run_id]
            missing, last = line.next_seq, max(line.parked)
            waiting = [line.parked[seq_id] for seq_id in sorted(line.parked)]
            # Unloading a run does not depend on anything before it.
            unloads = [operation for operation in waiting if operation.kind is Kind.UNLOAD]
            line.ready.extend(unloads)
            line.parked.clear()
            line.rejected = {seq_id for seq_id in line.rejected if seq_id > last}
            line.next_seq = last + 1
            self._advance(run_id, line, now)
            expired = [operation for operation in waiting if operation.kind is not Kind.UNLOAD]
            timeouts.append(GapTimeout(missing, expired, unloads))
        return timeouts

    def next_gap_deadline(self) -> float | None:
        """When :meth:`expire_gaps` will next have something to do."""
        return min(self._gaps.values()) + self._gap_timeout_s if self._gaps else None

    def _advance(self, run_id: str, line: _Line, now: float) -> Sequence[Operation]:
        """Move parked operations whose turn has come; returns them."""
        before = line.next_seq
        moved: list[Operation] = []
        while line.next_seq in line.parked or line.next_seq in line.rejected:
            operation = line.parked.pop(line.next_seq, None)
            if operation is not None:
                moved.append(operation)
            line.rejected.discard(line.next_seq)
            line.next_seq += 1
        line.ready.extend(moved)
        if line.ready:
            self._ready.add(run_id)
        if not line.parked:
            self._gaps.pop(run_id, None)
        elif line.next_seq > before or run_id not in self._gaps:
            self._gaps[run_id] = now
        return moved
