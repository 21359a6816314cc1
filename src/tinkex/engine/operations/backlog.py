"""Accepted work that has not finished, shared between the threads that accept it and the one that runs it."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tinkex.engine.operations.spans import OperationSpans
from tinkex.engine.scheduler import (
    FairShare,
    Kind,
    Missed,
    Pace,
    Pass,
    Plan,
    Queue,
    SampleQueue,
    Work,
    next_plan,
)
from tinkex.engine.store import Timing
from tinkex.errors import EngineFailure, OverQuota
from tinkex.types import (
    CreateModelRequest,
    ForwardBackwardRequest,
    LoadWeightsRequest,
    OptimStepRequest,
    SampleRequest,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
    UnloadModelRequest,
)

Operation: TypeAlias = (
    CreateModelRequest
    | ForwardBackwardRequest
    | OptimStepRequest
    | SaveWeightsRequest
    | SaveWeightsForSamplerRequest
    | SaveWeightsExternalRequest
    | LoadWeightsRequest
    | UnloadModelRequest
    | SampleRequest
)
"""The requests that are accepted now and finish later."""


@dataclass(frozen=True)
class QueueState:
    """What a caller that still waits is told: the state of its queue, and why."""

    state: str
    reason: str


class Backlog:
    """Everything accepted and unfinished. Every method may be called from any thread."""

    def __init__(
        self,
        *,
        gap_timeout_s: float,
        max_pending: int,
        max_tokens_per_s: int | None = None,
        on_work: Callable[[], None],
    ) -> None:
        self._lock = threading.Lock()
        self._queue = Queue[Operation](gap_timeout_s)
        self._samples: dict[str, SampleQueue[Operation]] = {}
        self._unfinished: dict[str, Work[Operation]] = {}
        self._by_tenant: Counter[str] = Counter()
        self._running: set[str] = set()
        self._started: dict[str, float] = {}
        self._cancelled: list[str] = []
        self._max_pending = max_pending
        self._pace = Pace[str](max_tokens_per_s)
        self._max_tokens_per_s = max_tokens_per_s
        self._spent: dict[str, int] = {}
        self._turns = FairShare[str]()
        self._on_work = on_work
        self.spans = OperationSpans()
        """What is traced of it, from here to whoever knows how it ended."""

    # ---- accepting

    def check_room(self, tenant: str, run_id: str = "", seq_id: int = 0) -> None:
        """Refuse, for now, a user who has too much waiting or is too fast, but not the operation that others wait for."""
        with self._lock:
            if self._queue.is_missing(run_id, seq_id):
                return
            if self._by_tenant[tenant] >= self._max_pending:
                raise OverQuota(
                    f"{self._max_pending} operations of yours are waiting already; fetch their results, then submit more."
                )
            wait_s = self._pace.wait_s(tenant)
            if wait_s > 0:
                refused = OverQuota(
                    f"a user may have {self._max_tokens_per_s} tokens computed in a second, and yours are used up for "
                    f"{wait_s:.1f} s; submit it again then."
                )
                refused.retry_after_s = wait_s
                raise refused

    def open(self, run_id: str, first: Work[Operation]) -> None:
        """Start a run with the operation that creates it."""
        with self._lock:
            self._queue.open(run_id, first=first)
            self._note(first)
        self._on_work()

    def resume(
        self, run_id: str, next_seq: int, used: Sequence[int], works: Sequence[Work[Operation]], now: float
    ) -> None:
        """Put a run of an earlier engine back: what it has done, and what it was still to do."""
        with self._lock:
            first = next((work for work in works if work.seq_id == 0), None)
            self._queue.open(run_id, first=first, next_seq=max(next_seq, 1))
            for seq_id in used:
                self._queue.refuse(run_id, seq_id, now)
            for work in works:
                if work.seq_id > 0:
                    self._queue.put(work, now)
                self._note(work)
        self._on_work()

    def put(self, work: Work[Operation], now: float) -> None:
        """Add an operation of a run."""
        with self._lock:
            self._queue.put(work, now)
            self._note(work)
            self._pace.charge(work.tenant, work.num_tokens)
        self._on_work()

    def put_sample(self, work: Work[Operation]) -> None:
        """Add a sample."""
        with self._lock:
            self._samples.setdefault(work.group, SampleQueue()).put(work)
            self._note(work)
            self._pace.charge(work.tenant, work.num_tokens)
        self._on_work()

    def expected(self, run_id: str) -> int:
        """The next free number of a run."""
        with self._lock:
            return self._queue.expected(run_id)

    def check_turn(self, run_id: str, seq_id: int) -> None:
        """Refuse a number that cannot run (any more)."""
        with self._lock:
            self._queue.check_turn(run_id, seq_id)

    def refuse(self, run_id: str, seq_id: int, now: float) -> bool:
        """Use up the number of a refused submission; says whether it was free."""
        with self._lock:
            free = self._queue.refuse(run_id, seq_id, now)
        self._on_work()
        return free

    def cancel(self, request_id: str) -> bool:
        """Give up a sample; True if it is out already, else the running batch is asked to drop it."""
        with self._lock:
            work = self._unfinished.get(request_id)
            if work is None or work.kind is not Kind.SAMPLE:
                return False
            if self._samples[work.group].cancel(request_id) is not None:
                return True
            self._cancelled.append(request_id)
        self._on_work()
        return False

    # ---- running

    def next_plan(self, token_budget: int) -> Plan[Operation] | None:
        """Take the training work that runs next."""
        with self._lock:
            plan = next_plan(self._queue, self._turns, token_budget)
            if plan is not None:
                self._running = {work.request_id for work in works_of(plan)}
                self._started |= dict.fromkeys(self._running, time.time())
        if plan is not None:
            self.spans.started(works_of(plan))
        return plan

    def has_training(self) -> bool:
        """Whether a run has an operation ready."""
        with self._lock:
            return next(self._queue.runs(), None) is not None

    def take_sample(self, group: str) -> Work[Operation] | None:
        """Take the sample that joins the batch next."""
        with self._lock:
            work = self._samples[group].take() if group in self._samples else None
            if work is not None:
                self._started[work.request_id] = time.time()
        if work is not None:
            self.spans.started([work])
        return work

    def groups_with_samples(self) -> Sequence[str]:
        """The base models samples wait for."""
        with self._lock:
            return [group for group, queue in self._samples.items() if len(queue)]

    def take_cancelled(self) -> Sequence[str]:
        """The running samples nobody wants any more."""
        with self._lock:
            cancelled, self._cancelled = self._cancelled, []
            return cancelled

    def give_up_gaps(self, now: float) -> Sequence[Missed[Operation]]:
        """Take the operations that waited too long for a missing number."""
        with self._lock:
            return self._queue.give_up_gaps(now)

    def next_gap_deadline(self) -> float | None:
        """When :meth:`give_up_gaps` has something to do next."""
        with self._lock:
            return self._queue.next_gap_deadline()

    def close(self, run_id: str) -> Sequence[Work[Operation]]:
        """End a run; returns the operations that will never run."""
        with self._lock:
            return self._queue.close(run_id)

    def timings(self, request_ids: Iterable[str]) -> Mapping[str, Timing]:
        """When operations began to run, and what they cost."""
        with self._lock:
            return {
                request_id: Timing(self._started.get(request_id), self._unfinished[request_id].num_tokens)
                for request_id in request_ids
                if request_id in self._unfinished
            }

    def spent(self, request_id: str, num_tokens: int) -> None:
        """Note what a sample took in the end: it was let in for all it might take."""
        with self._lock:
            self._spent[request_id] = num_tokens

    def finished(self, request_ids: Iterable[str]) -> Sequence[Work[Operation]]:
        """Forget operations that have an outcome; returns those that were known."""
        ended: list[Work[Operation]] = []
        with self._lock:
            for request_id in request_ids:
                work = self._unfinished.pop(request_id, None)
                self._started.pop(request_id, None)
                spent = self._spent.pop(request_id, 0)
                if work is not None:
                    ended.append(work)
                    if work.kind is Kind.SAMPLE:
                        self._pace.charge(work.tenant, spent - work.num_tokens)
                    self._by_tenant[work.tenant] -= 1
                    if self._by_tenant[work.tenant] <= 0:
                        del self._by_tenant[work.tenant]
                self._running.discard(request_id)
        return ended

    # ---- telling

    def depths(self) -> Mapping[tuple[Kind, bool], int]:
        """How many operations of each kind wait (False) and run (True)."""
        with self._lock:
            return Counter(
                (work.kind, request_id in self._started) for request_id, work in self._unfinished.items()
            )

    def describe(self, request_id: str) -> QueueState:
        """Why an operation has no result yet."""
        with self._lock:
            work = self._unfinished.get(request_id)
            if work is None or request_id in self._running:
                return QueueState("active", "running now")
            if work.kind is Kind.SAMPLE:
                queue = self._samples[work.group]
                if request_id not in queue:
                    return QueueState("active", "sampling now")
                return QueueState(
                    "paused_capacity", f"{len(queue)} samples wait for a place in the decode batch"
                )
            missing = self._queue.waiting_for(work.run_id, work.seq_id)
            if missing is not None:
                return QueueState(
                    "active", f"waits for operation {missing} of its run, which has not arrived"
                )
            ahead = sum(other.kind is not Kind.SAMPLE for other in self._unfinished.values()) - 1
            return QueueState("active", f"in line with {ahead} other training operations")

    def _note(self, work: Work[Operation]) -> None:
        self._unfinished[work.request_id] = work
        self._by_tenant[work.tenant] += 1
        self.spans.queued(work)


def works_of(plan: Plan[Operation]) -> Sequence[Work[Operation]]:
    """The operations a plan runs."""
    return plan.works if isinstance(plan, Pass) else (plan.work,)


def never_came(missed: Missed[Operation]) -> EngineFailure:
    """What an operation fails with that waited too long for a number before its own."""
    work = missed.work
    return EngineFailure(
        f"operation {work.seq_id} of run {work.run_id} was never run: it waited for operation {missed.missing}, which did not "
        "arrive in time. Nothing was changed; submit it again under the next number."
    )
