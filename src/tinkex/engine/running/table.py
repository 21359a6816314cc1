"""The table of unfinished operations: it owns them, their queues and their states."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from tinkex.engine.operation import Kind, Operation, State
from tinkex.engine.running import spans
from tinkex.engine.running.budgets import Budgets
from tinkex.engine.running.samples import Samples
from tinkex.engine.scheduler import (
    NO_LIMITS,
    FairShare,
    GapTimeout,
    LossCosts,
    MayRun,
    Queue,
    RunLimits,
    TokenRate,
    Turn,
    always,
    next_turns,
)
from tinkex.engine.scheduler.turn import BARRIER_COST
from tinkex.engine.store import Outcome


@dataclass(frozen=True)
class QueueState:
    """The state of an operation's queue, and why it has no outcome yet."""

    state: str
    reason: str


class OperationTable:
    """Owns every unfinished operation; only its methods change a state. Every method is safe to call from any thread.

    Each method takes the lock once, and nothing outside this class is called under it. ``on_ready`` is called when there may
    be something to run; ``clock`` is the one by which operations start.
    """

    def __init__(
        self,
        *,
        gap_timeout_s: float,
        budgets: Budgets,
        on_ready: Callable[[], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._lock = threading.Lock()
        self._operations: dict[str, Operation] = {}
        self._queue = Queue(gap_timeout_s)
        self._samples = Samples()
        self._retried_turns: deque[Turn] = deque()
        self._num_pending: Counter[str] = Counter()
        self._num_bytes: Counter[str] = Counter()
        self._total_bytes = 0
        self._num_training = 0
        self._new_ready: dict[str, None] = {}
        """Runs of which something has become ready."""
        self._held_bytes = 0
        self._parked: dict[str, Operation] = {}
        """Operations in memory that wait for an earlier number."""
        self._budgets = budgets
        self._rate = TokenRate[str](budgets.max_tokens_per_s)
        self._shares: defaultdict[str, FairShare[str]] = defaultdict(FairShare[str])
        """By lane: its users share the lane, however fast others are."""
        self._costs = LossCosts()
        self._on_ready = on_ready
        self._clock = clock
        self.intake_lock = threading.Lock()
        """Held while a submission is checked, recorded and added, and while a run is closed."""

    # ---- intake

    def check_room(
        self,
        owner: str,
        num_bytes: int = 0,
        run_id: str = "",
        seq_id: int = 0,
        also: Sequence[Operation] = (),
    ) -> None:
        """Raise ``OverQuota`` or ``Busy`` if there is no room for one more operation beside ``also``, which are added next.

        One that others wait for may exceed the budgets by the reserve.
        """
        with self._lock:
            is_missing = self._queue.is_missing(run_id, seq_id)
            num_pending, wait_s = self._num_pending[owner], self._rate.wait_s(owner)
            own, total = self._num_bytes[owner], self._total_bytes
        for operation in also:
            total += operation.num_bytes
            if operation.owner == owner:
                own, num_pending = own + operation.num_bytes, num_pending + 1
        if not is_missing:
            self._budgets.check_operations(num_pending)
        self._budgets.check_bytes(num_bytes, own, total, others_wait=is_missing)
        if not is_missing:
            self._budgets.check_rate(wait_s)

    def add(self, operation: Operation, now: float) -> None:
        """Add a sample, an operation of a run, or the one that creates its run."""
        spans.queued(operation)
        with self._lock:
            self._add(operation)
            ready: Sequence[Operation] = [operation]
            if operation.kind is Kind.SAMPLE:
                self._samples.put(operation)
            elif operation.seq_id == 0:
                self._queue.open(operation.run_id, first=operation)
            else:
                ready = self._queue.put(operation, now)
            self._make_ready(ready)
            self._hold(operation, ready)
            self._rate.charge(operation.owner, operation.num_tokens)
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
            self._make_ready(ready)
        self._on_ready()

    def next_number(self, run_id: str) -> int:
        """The next free number of a run."""
        with self._lock:
            return self._queue.next_number(run_id)

    def is_new(self, run_id: str, seq_id: int) -> bool:
        """Whether nothing was ever accepted or rejected under this number of a run."""
        with self._lock:
            return self._queue.is_new(run_id, seq_id)

    def check_number(self, run_id: str, seq_id: int) -> None:
        """Raise ``InvalidInput`` for a number that cannot run (any more)."""
        with self._lock:
            self._queue.check_number(run_id, seq_id)

    def reject(self, run_id: str, seq_id: int, now: float) -> bool:
        """Use up the number of a rejected submission; returns whether it was free."""
        with self._lock:
            ready = self._queue.reject(run_id, seq_id, now)
            self._make_ready(ready or ())
        self._on_ready()
        return ready is not None

    # ---- running

    def has_training(
        self,
        delayed: Container[str] = (),
        may_run: MayRun = always,
        among: AbstractSet[str] | None = None,
    ) -> bool:
        """Whether a training turn of users that are not ``delayed`` can run, of operations that ``may_run`` and runs ``among`` these."""
        with self._lock:
            if self._next_retried(delayed, may_run, among) is not None:
                return True
            may_run = self._after_retried(may_run)
            return any(map(may_run, self._queue.next_operations(delayed, among)))

    def ready_runs(self, among: AbstractSet[str] | None = None) -> Sequence[str]:
        """The runs with an operation that can run, of ``among`` if they are given, those of interrupted turns first."""
        with self._lock:
            interrupted = [each.run_id for turn in self._retried_turns for each in turn]
            found = dict.fromkeys([*interrupted, *self._queue.runs(among=among)])
            return [run_id for run_id in found if among is None or run_id in among]

    def take_new_ready(self) -> Sequence[str]:
        """The runs of which something has become ready since the last call; all that are ready after a lane was lost."""
        with self._lock:
            taken, self._new_ready = self._new_ready, {}
            return [run_id for run_id in taken if self._queue.first(run_id) is not None]  # others have ended

    def unfinished_runs(self) -> AbstractSet[str]:
        """The runs with operations that have not ended."""
        with self._lock:
            return {each.run_id for each in self._operations.values() if each.kind is not Kind.SAMPLE}

    def next_turns(
        self,
        token_budget: int,
        delayed: Container[str] = (),
        limits: RunLimits = NO_LIMITS,
        may_run: MayRun = always,
        *,
        lane: str,
        among: AbstractSet[str] | None = None,
        share_prefixes: bool = False,
        max_shared_tokens: int | None = None,
    ) -> Sequence[Turn]:
        """Start the training turns that are dispatched to a lane next: an interrupted one, or new ones.

        They have no operations of users that are ``delayed``, and only such that ``may_run``, of runs ``among`` these.
        """
        with self._lock:
            retried = self._next_retried(delayed, may_run, among)
            turns: Sequence[Turn]
            if retried is not None:
                self._retried_turns.remove(retried)
                turns = [retried]
            else:
                turns = next_turns(
                    self._queue,
                    self._shares[lane],
                    token_budget,
                    self._costs.estimate,
                    delayed,
                    limits,
                    self._after_retried(may_run),
                    among=among,
                    share_prefixes=share_prefixes,
                    max_shared_tokens=max_shared_tokens,
                )
            for turn in turns:
                self._start(turn, lane)
        for turn in turns:
            spans.started(turn)
        return turns

    def queued_samples(self, lane: str) -> Mapping[str, int]:
        """How many samples are queued, for every base model that has samples that are queued, or run on a lane."""
        with self._lock:
            return self._samples.num_queued(lane)

    def waiting_samples(self) -> Mapping[str, int]:
        """How many samples are queued, by base model, whatever lane they may join."""
        with self._lock:
            return self._samples.waiting()

    def peek_retried_sample(self, model: str) -> Operation | None:
        """The interrupted sample that runs before all queued ones, or None."""
        with self._lock:
            return self._samples.retried(model)

    def start_sample(self, lane: str, model: str, accepts: MayRun | None = None) -> Operation | None:
        """Start the sample that joins a lane's batch next: one that was interrupted, or the next in the queue that it accepts."""
        return self._start_sample(lane, lambda: self._samples.take(lane, model, accepts))

    def start_assigned_sample(
        self, lane: str, model: str, assign: Callable[[Operation], str | None]
    ) -> Operation | None:
        """Start the sample that joins a lane's batch next: one that was interrupted, or the next one that is assigned to the lane."""
        return self._start_sample(lane, lambda: self._samples.take_assigned(lane, model, assign))

    def _start_sample(self, lane: str, take: Callable[[], Operation | None]) -> Operation | None:
        with self._lock:
            operation = take()
            if operation is not None:
                self._start([operation], lane)
        if operation is not None:
            spans.started([operation])
        return operation

    def assign_samples_again(self) -> None:
        """Forget which lanes the queued samples are assigned to: other lanes run now."""
        with self._lock:
            self._samples.assign_again()

    def running_samples(self, lane: str, model: str | None = None) -> Sequence[Operation]:
        """The samples in the decode batch of a model on a lane, or in all batches of the lane."""
        with self._lock:
            return self._samples.running(lane, model)

    def cancel(self, request_id: str) -> Operation | None:
        """Cancel a sample: returns it if it had not started; a running one is marked, and leaves its batch with the next step."""
        with self._lock:
            operation = self._operations.get(request_id)
            if operation is None or operation.kind is not Kind.SAMPLE or operation.cancelled:
                return None
            operation.cancelled = True
            if operation.state is State.QUEUED:
                # It leaves the queue here, so that it cannot start before it has its outcome.
                self._samples.remove(operation)
                return operation
        self._on_ready()
        return None

    def expire_gaps(self, now: float) -> Sequence[GapTimeout]:
        """Take the operations that waited too long for a missing number."""
        with self._lock:
            timeouts = self._queue.expire_gaps(now)
            for each in timeouts:
                self._make_ready(each.ready)
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

    def compute(self, operations: Sequence[Operation], outcome: Outcome | None = None) -> Sequence[Operation]:
        """Take operations that have an outcome, which is committed next: ``outcome``, or the one that their lane has set."""
        with self._lock:
            for operation in operations:
                operation.move(State.COMPUTED)
                self._parked.pop(operation.request_id, None)
                self._held_bytes -= operation.held_bytes
                operation.held_bytes = 0
                if outcome is not None:
                    operation.outcome, operation.ran, operation.usage = outcome, False, {}
                elif operation.kind.packs:
                    self._costs.record(operation, operation.loss_tokens)
                    cost = max(operation.tokens_computed + operation.loss_tokens, BARRIER_COST)
                    self._shares[operation.lane].charge(operation.owner, cost - operation.charged)
                if operation.kind is Kind.SAMPLE:
                    self._samples.end(operation)
        return operations

    def end(self, operations: Iterable[Operation]) -> None:
        """Forget operations whose outcomes are committed."""
        with self._lock:
            for operation in operations:
                operation.move(State.ENDED)
                del self._operations[operation.request_id]
                self._num_training -= operation.kind is not Kind.SAMPLE
                if operation.kind is Kind.SAMPLE:
                    # It was admitted for all the tokens it might take.
                    self._rate.charge(operation.owner, sum(operation.usage.values()) - operation.num_tokens)
                self._num_pending[operation.owner] -= 1
                self._num_bytes[operation.owner] -= operation.num_bytes
                self._total_bytes -= operation.num_bytes
                if not self._num_pending[operation.owner]:
                    del self._num_pending[operation.owner], self._num_bytes[operation.owner]

    def requeue(self, turns: Sequence[Turn], samples: Sequence[Operation]) -> None:
        """Queue what ran on a lane that was lost: it runs first, in the same turns, so that the numbers are the same."""
        with self._lock:
            for turn in reversed(turns):
                _retry(turn)
                self._retried_turns.appendleft(turn)
            for operation in reversed(samples):
                _retry([operation])
                self._samples.put_back(operation)
            self._new_ready.update(dict.fromkeys(self._queue.runs()))

    # ---- views

    def has(self, owner: str, request_id: str) -> bool:
        """Whether an operation of this user is unfinished; its waiters will be notified."""
        with self._lock:
            operation = self._operations.get(request_id)
            return operation is not None and operation.owner == owner

    def depths(self) -> Mapping[tuple[Kind, bool], int]:
        """How many operations of each kind wait (False) and run (True)."""
        with self._lock:
            return Counter((each.kind, each.started_at is not None) for each in self._operations.values())

    @property
    def held_bytes(self) -> int:
        """The memory of the requests of waiting operations."""
        return self._held_bytes

    @property
    def num_bytes(self) -> int:
        """The size of the requests of all unfinished operations."""
        return self._total_bytes

    def find(self, request_id: str) -> Operation | None:
        """An unfinished operation, or None."""
        with self._lock:
            return self._operations.get(request_id)

    def unfinished(self) -> Sequence[Operation]:
        """Every unfinished operation, oldest first."""
        with self._lock:
            return list(self._operations.values())

    def sampled_directories(self) -> AbstractSet[str]:
        """The adapters that unfinished samples have been dispatched with."""
        with self._lock:
            found = {operation.directory for operation in self._operations.values()}
        return {directory for directory in found if directory is not None}

    def describe(self, request_id: str) -> QueueState:
        """Why an operation has no outcome yet."""
        with self._lock:
            operation = self._operations.get(request_id)
            if operation is None or operation.state in {State.RUNNING, State.COMPUTED}:
                return QueueState("active", "running now")
            if operation.kind is Kind.SAMPLE:
                num_waiting = self._samples.num_waiting(operation.model)
                return QueueState(
                    "paused_capacity", f"{num_waiting} samples wait for a place in the decode batch"
                )
            missing = self._queue.missing_number(operation.run_id, operation.seq_id)
            if missing is not None:
                return QueueState(
                    "active", f"waits for operation {missing} of its run, which has not arrived"
                )
            ahead = self._num_training - 1
            return QueueState("active", f"in line with {ahead} other training operations")

    # ---- with the lock held

    def _next_retried(
        self, delayed: Container[str], may_run: MayRun, among: AbstractSet[str] | None
    ) -> Turn | None:
        """The interrupted turn that runs next."""
        for turn in self._retried_turns:
            is_delayed = all(each.owner in delayed for each in turn)
            if not is_delayed and all(
                may_run(each) and (among is None or each.run_id in among) for each in turn
            ):
                return turn
        return None

    def _after_retried(self, may_run: MayRun) -> MayRun:
        """Lets no operation run before an interrupted one of its run."""
        if not self._retried_turns:
            return may_run
        interrupted = {each.run_id for turn in self._retried_turns for each in turn}
        return lambda operation: operation.run_id not in interrupted and may_run(operation)

    def _add(self, operation: Operation) -> None:
        self._operations[operation.request_id] = operation
        self._num_pending[operation.owner] += 1
        self._num_bytes[operation.owner] += operation.num_bytes
        self._total_bytes += operation.num_bytes
        self._num_training += operation.kind is not Kind.SAMPLE

    def _hold(self, operation: Operation, ready: Sequence[Operation]) -> None:
        """Keep the request of a new operation in memory if there is room; those that run later make room for it.

        What is dropped is on disk, and is read again when its operation runs.
        """
        self._held_bytes += operation.held_bytes
        if operation.state is State.RECORDED:
            self._parked[operation.request_id] = operation
        if self._held_bytes > self._budgets.max_held_bytes:
            for each in (*reversed(self._parked.values()), *reversed(ready)):
                self._held_bytes -= each.held_bytes
                each.request, each.job, each.held_bytes = None, None, 0
                self._parked.pop(each.request_id, None)
                if self._held_bytes <= self._budgets.max_held_bytes:
                    break

    def _make_ready(self, operations: Iterable[Operation]) -> None:
        for operation in operations:
            operation.move(State.QUEUED)
            self._parked.pop(operation.request_id, None)
            if operation.kind is not Kind.SAMPLE:
                self._new_ready[operation.run_id] = None

    def _start(self, operations: Iterable[Operation], lane: str) -> None:
        for operation in operations:
            operation.move(State.RUNNING)
            operation.lane = lane
            operation.started_at = operation.started_at or self._clock()
            self._held_bytes -= operation.held_bytes
            operation.held_bytes = 0


def _retry(operations: Iterable[Operation]) -> None:
    for operation in operations:
        operation.move(State.QUEUED)
        operation.attempt += 1
        operation.outcome, operation.ran, operation.usage = None, False, {}
