"""The table of unfinished operations: it owns them, their queues and their states."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tinkex.engine.operation import Kind, Operation, State
from tinkex.engine.running import spans
from tinkex.engine.scheduler import FairShare, GapTimeout, Queue, SampleQueue, TokenRate, Turn, next_turn
from tinkex.engine.store import Outcome, UsageKind
from tinkex.errors import OverQuota


@dataclass(frozen=True)
class QueueState:
    """The state of an operation's queue, and why it has no outcome yet."""

    state: str
    reason: str


class OperationTable:
    """Owns every unfinished operation; only its methods change a state. Every method is safe to call from any thread.

    Each method takes the lock once, and nothing outside this class is called under it. ``on_ready`` is called when there may
    be something to run.
    """

    def __init__(
        self,
        *,
        gap_timeout_s: float,
        max_pending: int,
        max_tokens_per_s: int | None = None,
        on_ready: Callable[[], None],
    ) -> None:
        self._lock = threading.Lock()
        self._operations: dict[str, Operation] = {}
        self._queue = Queue(gap_timeout_s)
        self._samples: dict[str, SampleQueue] = {}
        self._running_samples: dict[str, dict[str, Operation]] = {}
        self._retried_turns: deque[Turn] = deque()
        self._num_pending: Counter[str] = Counter()
        self._max_pending = max_pending
        self._rate = TokenRate[str](max_tokens_per_s)
        self._max_tokens_per_s = max_tokens_per_s
        self._shares = FairShare[str]()
        self._on_ready = on_ready
        self.intake_lock = threading.Lock()
        """Held while a submission is checked, recorded and added, and while a run is closed."""

    # ---- intake

    def check_room(self, owner: str, run_id: str = "", seq_id: int = 0) -> None:
        """Raise ``OverQuota`` for a user with too many pending operations or tokens, unless others wait for this one."""
        with self._lock:
            if self._queue.is_missing(run_id, seq_id):
                return
            num_pending, wait_s = self._num_pending[owner], self._rate.wait_s(owner)
        if num_pending >= self._max_pending:
            raise OverQuota(
                f"{self._max_pending} operations of yours are waiting already; fetch their results, then submit more."
            )
        if wait_s > 0:
            error = OverQuota(
                f"a user may have {self._max_tokens_per_s} tokens computed in a second, and yours are used up for "
                f"{wait_s:.1f} s; submit it again then."
            )
            error.retry_after_s = wait_s
            raise error

    def open_run(self, run_id: str, first: Operation) -> None:
        """Start a run with the operation that creates it."""
        spans.queued(first)
        with self._lock:
            self._queue.open(run_id, first=first)
            self._add(first)
            first.move(State.QUEUED)
        self._on_ready()

    def resume_run(
        self, run_id: str, next_seq: int, used: Sequence[int], operations: Sequence[Operation], now: float
    ) -> None:
        """Put a run of an earlier engine back: the numbers it has used, and the operations that have not run."""
        with self._lock:
            first = next((operation for operation in operations if operation.seq_id == 0), None)
            self._queue.open(run_id, first=first, next_seq=max(next_seq, 1))
            ready = [first] if first is not None else []
            for seq_id in used:
                ready += self._queue.reject(run_id, seq_id, now) or ()
            for operation in operations:
                self._add(operation)
                if operation.seq_id > 0:
                    ready += self._queue.put(operation, now)
            _move(ready, State.QUEUED)
        self._on_ready()

    def add(self, operation: Operation, now: float) -> None:
        """Add an operation of a run."""
        spans.queued(operation)
        with self._lock:
            self._add(operation)
            _move(self._queue.put(operation, now), State.QUEUED)
            self._rate.charge(operation.owner, operation.num_tokens)
        self._on_ready()

    def add_sample(self, operation: Operation) -> None:
        """Add a sample."""
        spans.queued(operation)
        with self._lock:
            self._add(operation)
            self._samples.setdefault(operation.model, SampleQueue()).put(operation)
            operation.move(State.QUEUED)
            self._rate.charge(operation.owner, operation.num_tokens)
        self._on_ready()

    def next_number(self, run_id: str) -> int:
        """The next free number of a run."""
        with self._lock:
            return self._queue.next_number(run_id)

    def check_number(self, run_id: str, seq_id: int) -> None:
        """Raise ``InvalidInput`` for a number that cannot run (any more)."""
        with self._lock:
            self._queue.check_number(run_id, seq_id)

    def reject(self, run_id: str, seq_id: int, now: float) -> bool:
        """Use up the number of a rejected submission; returns whether it was free."""
        with self._lock:
            ready = self._queue.reject(run_id, seq_id, now)
            _move(ready or (), State.QUEUED)
        self._on_ready()
        return ready is not None

    # ---- running

    def has_training(self) -> bool:
        """Whether a training turn can run."""
        with self._lock:
            return bool(self._retried_turns) or next(self._queue.runs(), None) is not None

    def next_turn(self, token_budget: int) -> Turn | None:
        """Start the training turn that runs next: one that was interrupted, or a new one."""
        with self._lock:
            turn = (
                self._retried_turns.popleft()
                if self._retried_turns
                else next_turn(self._queue, self._shares, token_budget)
            )
            if turn is not None:
                _start(turn.operations)
        if turn is not None:
            spans.started(turn.operations)
        return turn

    def models_with_samples(self) -> Sequence[str]:
        """The base models that have samples, queued or running."""
        with self._lock:
            return [each for each in self._samples if self._running_samples.get(each) or self._samples[each]]

    def peek_retried_sample(self, model: str) -> Operation | None:
        """The interrupted sample that runs before all queued ones, or None."""
        with self._lock:
            return self._samples[model].retried

    def start_sample(self, model: str) -> Operation | None:
        """Start the sample that joins the batch next: one that was interrupted, or the next in the queue."""
        with self._lock:
            operation = self._samples[model].take()
            if operation is not None:
                _start([operation])
                self._running_samples.setdefault(model, {})[operation.request_id] = operation
        if operation is not None:
            spans.started([operation])
        return operation

    def running_samples(self, model: str) -> Sequence[Operation]:
        """The samples in the decode batch of a model."""
        with self._lock:
            return list(self._running_samples.get(model, {}).values())

    def all_running_samples(self) -> Sequence[Operation]:
        """The samples in all decode batches."""
        with self._lock:
            return [each for members in self._running_samples.values() for each in members.values()]

    def cancel(self, request_id: str) -> Operation | None:
        """Cancel a sample: returns it if it had not started; a running one is marked, and leaves its batch with the next step."""
        with self._lock:
            operation = self._operations.get(request_id)
            if operation is None or operation.kind is not Kind.SAMPLE or operation.cancelled:
                return None
            operation.cancelled = True
            if operation.state is State.QUEUED:
                # It leaves the queue here, so that it cannot start before it has its outcome.
                self._samples[operation.model].remove(operation)
                return operation
        self._on_ready()
        return None

    def expire_gaps(self, now: float) -> Sequence[GapTimeout]:
        """Take the operations that waited too long for a missing number."""
        with self._lock:
            timeouts = self._queue.expire_gaps(now)
            for each in timeouts:
                _move(each.ready, State.QUEUED)
            return timeouts

    def next_gap_deadline(self) -> float | None:
        """When :meth:`expire_gaps` has something to do next."""
        with self._lock:
            return self._queue.next_gap_deadline()

    def close_run(self, run_id: str) -> Sequence[Operation]:
        """End a run; returns the operations that will never run."""
        with self._lock:
            return self._queue.close(run_id)

    # ---- outcomes

    def compute(
        self,
        operation: Operation,
        outcome: Outcome,
        *,
        ran: bool = False,
        usage: Mapping[UsageKind, int] | None = None,
    ) -> Operation:
        """Give an operation its outcome, which is committed next; returns the operation."""
        with self._lock:
            operation.move(State.COMPUTED)
            operation.outcome, operation.ran, operation.usage = outcome, ran, usage or {}
            self._running_samples.get(operation.model, {}).pop(operation.request_id, None)
        return operation

    def end(self, operations: Iterable[Operation]) -> None:
        """Forget operations whose outcomes are committed."""
        with self._lock:
            for operation in operations:
                operation.move(State.ENDED)
                del self._operations[operation.request_id]
                if operation.kind is Kind.SAMPLE:
                    # It was admitted for all the tokens it might take.
                    self._rate.charge(operation.owner, sum(operation.usage.values()) - operation.num_tokens)
                self._num_pending[operation.owner] -= 1
                if not self._num_pending[operation.owner]:
                    del self._num_pending[operation.owner]

    def requeue(self, turns: Sequence[Turn], samples: Sequence[Operation]) -> None:
        """Queue what ran on a lane that was lost: it runs first, in the same turns, so that the numbers are the same."""
        with self._lock:
            for turn in reversed(turns):
                _retry(turn.operations)
                self._retried_turns.appendleft(turn)
            for operation in reversed(samples):
                _retry([operation])
                del self._running_samples[operation.model][operation.request_id]
                self._samples[operation.model].put_back(operation)

    # ---- views

    def depths(self) -> Mapping[tuple[Kind, bool], int]:
        """How many operations of each kind wait (False) and run (True)."""
        with self._lock:
            return Counter((each.kind, each.started_at is not None) for each in self._operations.values())

    def unfinished(self) -> Sequence[Operation]:
        """Every unfinished operation, oldest first."""
        with self._lock:
            return list(self._operations.values())

    def describe(self, request_id: str) -> QueueState:
        """Why an operation has no outcome yet."""
        with self._lock:
            operation = self._operations.get(request_id)
            if operation is None or operation.state in {State.RUNNING, State.COMPUTED}:
                return QueueState("active", "running now")
            if operation.kind is Kind.SAMPLE:
                num_waiting = len(self._samples[operation.model])
                return QueueState(
                    "paused_capacity", f"{num_waiting} samples wait for a place in the decode batch"
                )
            missing = self._queue.missing_number(operation.run_id, operation.seq_id)
            if missing is not None:
                return QueueState(
                    "active", f"waits for operation {missing} of its run, which has not arrived"
                )
            ahead = sum(other.kind is not Kind.SAMPLE for other in self._operations.values()) - 1
            return QueueState("active", f"in line with {ahead} other training operations")

    def _add(self, operation: Operation) -> None:
        self._operations[operation.request_id] = operation
        self._num_pending[operation.owner] += 1


def _start(operations: Iterable[Operation]) -> None:
    for operation in operations:
        operation.move(State.RUNNING)
        operation.started_at = operation.started_at or time.time()


def _retry(operations: Iterable[Operation]) -> None:
    for operation in operations:
        operation.move(State.QUEUED)
        operation.attempt += 1


def _move(operations: Iterable[Operation], state: State) -> None:
    for operation in operations:
        operation.move(state)
