"""A cluster in virtual time: the scheduler is the real one, the lanes take the time that their jobs cost.

What decides is the engine's own: ``OperationTable`` with its queues, fair shares and turns, ``Placement``, ``SampleRouter`` and
``start_sample``. What is replaced is what computes, stores and waits: lanes, journal, HTTP and the clock.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from math import ceil

from simulation_costs import Costs

from tinkex.engine.config import EngineConfig
from tinkex.engine.lanes.roles import LaneSpec, Role, lane_specs
from tinkex.engine.operation import Kind, Operation
from tinkex.engine.running.budgets import Budgets
from tinkex.engine.running.placement import Placement
from tinkex.engine.running.sampling import MAX_JOB_S, start_sample
from tinkex.engine.running.table import OperationTable
from tinkex.engine.scheduler import FairShare, SampleRouter, Turn
from tinkex.engine.store import Store

MODEL = "base"
TRAIN, DECODE = "train", "decode"
NO_LIMIT = 2**62
MAX_LANES = 256
MAX_RHO = 0.95
"""The share of the loop that reports of decode jobs may take before it counts as saturated."""


class Clock:
    """Virtual seconds, and what happens when.

    >>> clock, seen = Clock(), []
    >>> clock.at(2.0, lambda: seen.append(clock.now))
    >>> clock.at(1.0, lambda: seen.append(clock.now))
    >>> clock.run()
    >>> seen
    [1.0, 2.0]
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self.num_events = 0

    def at(self, seconds: float, call: Callable[[], None]) -> None:
        """Make a call at a time that has not passed; calls of the same time are made in order."""
        heapq.heappush(self._events, (max(seconds, self.now), next(self._numbers), call))

    def run(self, until: float = float("inf")) -> None:
        """Make the calls up to a time, or until there are none."""
        while self._events and self._events[0][0] <= until:
            self.now, _, call = heapq.heappop(self._events)
            self.num_events += 1
            call()
        if until < float("inf"):
            self.now = max(self.now, until)


@dataclass(frozen=True)
class ControlPlane:
    """What the one API process takes: for an operation from the request to the delivered result, and for a report of a decode job."""

    name: str = "none"
    operation_s: float = 0.0
    report_s: float = 0.0


@dataclass
class Job:
    """What a lane computes, and what that costs."""

    seconds: float
    turns: Sequence[Turn] = ()
    prefill_s: float = 0.0
    steps: Sequence[tuple[int, float]] = ()
    """Decode steps: how many, and what each takes; they take less when sequences have ended."""
    started: float = 0.0

    @property
    def num_steps(self) -> int:
        """How many decode steps it has."""
        return sum(number for number, _ in self.steps)

    def cut(self, passed_s: float) -> bool:
        """Let it end with the decode step that runs after so many seconds; returns whether it has become shorter."""
        kept: list[tuple[int, float]] = []
        left = passed_s - self.prefill_s
        for number, step_s in self.steps:
            wanted = max(ceil(left / step_s), 0) if kept else max(ceil(left / step_s), 1)
            if wanted <= number:
                kept += [(wanted, step_s)] * (wanted > 0)
                break
            kept.append((number, step_s))
            left -= number * step_s
        if sum(number for number, _ in kept) == self.num_steps:
            return False
        self.steps = kept
        self.seconds = self.prefill_s + sum(number * step_s for number, step_s in kept)
        return True


@dataclass
class Sample:
    """A sample in a decode batch."""

    operation: Operation
    num_left: int


class SimulatedLane:
    """One lane: it runs a job at a time, and reports after the time that it takes."""

    def __init__(self, spec: LaneSpec, cluster: Cluster) -> None:
        self.name, self.role = spec.name, spec.role
        self._cluster, self._costs = cluster, cluster.costs
        self._shares = FairShare[str]()
        self._steps = 0
        self._sequences: list[tuple[int, int, Sample]] = []
        """The sequences of the batch, by the step after which they end."""
        self._numbers = count()
        self._prefill_s = 0.0
        self.job: Job | None = None
        self._epoch = 0
        self.busy_s = 0.0
        self.sequence_s = 0.0
        """Of all places in its batch, the seconds that they were taken."""

    @property
    def has_room(self) -> bool:
        """Whether another sequence fits into the batch."""
        return len(self._sequences) < self._costs.max_decode_batch

    @property
    def is_decoding(self) -> bool:
        """Whether its job is of decode steps."""
        return self.job is not None and not self.job.turns

    # ---- planning, as the controller of a lane does it

    def plan(self) -> Job | None:
        """What it does next; training and sampling share its time while both have work."""
        cluster = self._cluster
        own = cluster.own_runs(self.name)
        has_training = Role.TRAIN in self.role and cluster.table.has_training(among=own)
        has_samples = Role.SAMPLE in self.role and bool(cluster.table.queued_samples(self.name))
        wanting = [TRAIN] * has_training + [DECODE] * has_samples
        if not wanting:
            return None
        self._shares.waiting(wanting)
        if self._shares.pick(wanting) == DECODE:
            job = self._plan_decode(is_alone=not has_training)
            if job is not None or not has_training:
                return job
        turns = cluster.table.next_turns(self._costs.max_tokens_per_pass, lane=self.name, among=own)
        return Job(sum(map(self._turn_s, turns)), turns) if turns else None

    def _turn_s(self, turn: Turn) -> float:
        first = turn[0]
        if first.kind.packs:
            return self._costs.pass_s + self._costs.train_token_s * sum(each.tokens_computed for each in turn)
        return self._costs.optim_step_s if first.kind is Kind.OPTIM_STEP else self._costs.save_s

    def _plan_decode(self, *, is_alone: bool) -> Job | None:
        cluster, costs = self._cluster, self._costs
        while self.has_room:
            operation = start_sample(
                cluster.table,
                cluster.router,
                self.name,
                MODEL,
                costs.max_decode_batch,
                is_idle=not self._sequences,
            )
            if operation is None:
                break
            work = cluster.work[operation.request_id]
            sample = Sample(operation, len(work.new_tokens))
            self._prefill_s += work.prompt_tokens * costs.prefill_token_s  # of a group only once
            for new_tokens in work.new_tokens:
                heapq.heappush(self._sequences, (self._steps + new_tokens, next(self._numbers), sample))
        if not self._sequences:
            return None
        steps = self._steps_to_next() if is_alone else [(1, costs.decode_s(len(self._sequences)))]
        prefill_s, self._prefill_s = self._prefill_s, 0.0
        seconds = prefill_s + sum(number * step_s for number, step_s in steps)
        return Job(seconds, (), prefill_s, steps)

    def _steps_to_next(self) -> Sequence[tuple[int, float]]:
        """The steps to the next that matters: a sample ends, or in a full batch a sequence."""
        costs, size, now = self._costs, len(self._sequences), self._steps
        if not self.has_room:
            return [(self._sequences[0][0] - now, costs.decode_s(size))]
        left: dict[str, int] = {}
        steps: list[tuple[int, float]] = []
        for end, _, sample in sorted(self._sequences):
            if end > now:
                steps.append((end - now, costs.decode_s(size)))
                now = end
            size -= 1
            name = sample.operation.request_id
            left[name] = left.get(name, sample.num_left) - 1
            if not left[name]:
                break
        return steps

    # ---- running

    def dispatch(self, job: Job) -> None:
        """Start a job."""
        self.job, job.started = job, self._cluster.clock.now
        self._report_later()

    def cut(self) -> None:
        """Have decode steps report after the current one: a sample has arrived that can join."""
        job = self.job
        if job is None or not self.is_decoding or not self.has_room:
            return
        if job.cut(self._cluster.clock.now - job.started):
            self._report_later()

    def _report_later(self) -> None:
        assert self.job is not None
        self._epoch += 1
        epoch = self._epoch
        self._cluster.clock.at(
            self.job.started + self.job.seconds,
            lambda: self._cluster.report(self) if epoch == self._epoch else None,
        )

    def complete(self) -> Sequence[Operation]:
        """Take the report of the job; returns the operations that have ended."""
        job, self.job = self.job, None
        assert job is not None
        busy_s = self._cluster.inside(job.started, job.started + job.seconds)
        self.busy_s += busy_s
        self.sequence_s += busy_s * len(self._sequences) * (not job.turns)
        self._shares.charge(TRAIN if job.turns else DECODE, job.seconds)
        if job.turns:
            return [operation for turn in job.turns for operation in turn]
        self._steps += job.num_steps
        ended: list[Operation] = []
        while self._sequences and self._sequences[0][0] <= self._steps:
            _, _, sample = heapq.heappop(self._sequences)
            sample.num_left -= 1
            if not sample.num_left:
                ended.append(sample.operation)
        return ended


@dataclass
class Work:
    """What the lanes must know of an operation, and the scheduler does not."""

    accepted: float
    on_done: Callable[[Operation], None]
    prompt_tokens: int = 0
    new_tokens: Sequence[int] = ()


@dataclass
class Record:
    """An operation that has ended."""

    owner: str
    kind: Kind
    tokens: int
    submitted: float
    started: float
    ended: float


def specs_of(trainers: int, samplers: int) -> Sequence[LaneSpec]:
    """The lanes as the engine makes them, which accepts up to 256 of each role, or more."""
    if max(trainers, samplers) <= MAX_LANES:
        return lane_specs(EngineConfig(trainers=trainers, samplers=samplers))
    return [
        *(LaneSpec(f"trainer-{number}", Role.TRAIN) for number in range(trainers)),
        *(LaneSpec(f"sampler-{number}", Role.SAMPLE) for number in range(samplers)),
    ]


@dataclass
class Cluster:
    """Lanes, one control plane, and the scheduler between them.

    ``window`` is the time of which utilisation is taken; there are records of the operations that end in it.
    """

    costs: Costs
    trainers: int
    samplers: int
    store: Store
    window: tuple[float, float]
    control: ControlPlane = field(default_factory=ControlPlane)

    def __post_init__(self) -> None:
        self.clock = Clock()
        self.table = OperationTable(
            gap_timeout_s=300.0,
            budgets=Budgets(NO_LIMIT, NO_LIMIT, NO_LIMIT, NO_LIMIT, NO_LIMIT),
            on_ready=lambda: None,
            clock=lambda: self.clock.now,
        )
        specs = specs_of(self.trainers, self.samplers)
        trainers = [spec.name for spec in specs if Role.TRAIN in spec.role]
        self.placement = Placement(self.store, trainers, self.table.unfinished_runs)
        self.router = SampleRouter([spec.name for spec in specs if Role.SAMPLE in spec.role])
        self.lanes = {spec.name: SimulatedLane(spec, self) for spec in specs}
        self._samplers = [lane for lane in self.lanes.values() if Role.SAMPLE in lane.role]
        self._shared = [lane for lane in self._samplers if Role.TRAIN in lane.role]
        self._idle_samplers = {lane.name: lane for lane in self._samplers}
        self._names = list(self.lanes)
        self._dispatching: set[str] = set()
        self.work: dict[str, Work] = {}
        self.records: list[Record] = []
        self._arrived: list[Operation] = []
        self._reported: list[SimulatedLane] = []
        self._is_stepping = False
        self._arrival_gap_s = 1.0
        self._last_arrival = 0.0
        self._free_at = self._share = self._share_since = self._share_until = 0.0
        self.control_busy_s = 0.0
        self.report_busy_s = 0.0
        """What decode jobs took of it by their reports between the events that are simulated."""
        self.scheduler_s = 0.0
        """The CPU time that the scheduler took."""
        self.num_jobs = self.num_submitted = self.num_ended = 0

    # ---- what clients do

    def create_runs(self, run_ids: Sequence[str]) -> None:
        """Open runs, and place them."""
        for run_id in run_ids:
            self.table.resume_run(run_id, 1, [], [], self.clock.now)
        if self.placement.has_choice:
            self.placement.place(run_ids, self._names)

    def submit(self, operation: Operation, work: Work) -> None:
        """Send an operation to the server."""
        self.work[operation.request_id] = work
        self._serve(self.control.operation_s / 2, lambda: self._arrive(operation))
        self.num_submitted += 1
        gap = self.clock.now - self._last_arrival
        self._last_arrival = self.clock.now
        self._arrival_gap_s += 0.01 * (gap - self._arrival_gap_s)

    @property
    def backlog_s(self) -> float:
        """What the control plane still has to do."""
        return max(0.0, self._free_at - self.clock.now)

    def inside(self, start: float, end: float) -> float:
        """The seconds of an interval that are in the window."""
        return max(0.0, min(end, self.window[1]) - max(start, self.window[0]))

    def own_runs(self, lane: str) -> AbstractSet[str] | None:
        """The runs that are pinned to a trainer; None for all."""
        is_one_of_several = self.placement.has_choice and Role.TRAIN in self.lanes[lane].role
        return self.placement.runs_on(lane) if is_one_of_several else None

    # ---- the loop: collect, commit, plan, dispatch

    def report(self, lane: SimulatedLane) -> None:
        """Take the report of a lane with the next step."""
        self._reported.append(lane)
        self._wake()

    def _wake(self) -> None:
        if not self._is_stepping:
            self._is_stepping = True
            self.clock.at(self.clock.now, self._step)

    def _step(self) -> None:
        arrived, self._arrived = self._arrived, []
        reported, self._reported = self._reported, []
        with self._timed():
            touched, ended = self._collect(arrived, reported)
            jobs = self._plan(touched)
        self._is_stepping = False
        if jobs:
            self._serve(self.control.report_s * len(jobs), lambda: self._dispatch(jobs))
        for operation in ended:
            self._serve(self.control.operation_s / 2, lambda each=operation: self._deliver(each))  # type: ignore[misc]

    def _arrive(self, operation: Operation) -> None:
        self._arrived.append(operation)
        self._wake()

    def _dispatch(self, jobs: Sequence[tuple[SimulatedLane, Job]]) -> None:
        for lane, job in jobs:
            self._dispatching.discard(lane.name)
            lane.dispatch(job)

    def _serve(self, seconds: float, then: Callable[[], None]) -> None:
        """Let the one API process take so long, after all it has to do before; reports of decode jobs take their share of it.

        An operation takes half of its time until it is accepted, and half after it has run, until the client has its result.
        """
        if not seconds:
            then()
            return
        start = max(self.clock.now, self._free_at)
        free = 1 - self._reporting_share()
        self._free_at = start + seconds / free
        self.control_busy_s += self.inside(start, self._free_at) * free
        self.clock.at(self._free_at, then)

    def _deliver(self, operation: Operation) -> None:
        work = self.work.pop(operation.request_id)
        self.num_ended += 1
        assert operation.started_at is not None
        if self.window[0] <= self.clock.now < self.window[1]:
            self.records.append(
                Record(
                    operation.owner,
                    operation.kind,
                    sum(work.new_tokens) + work.prompt_tokens or operation.tokens_computed,
                    work.accepted,
                    operation.started_at,
                    self.clock.now,
                )
            )
        work.on_done(operation)

    def _collect(
        self, arrived: Sequence[Operation], reported: Sequence[SimulatedLane]
    ) -> tuple[dict[str, SimulatedLane], Sequence[Operation]]:
        """Add what has arrived, and complete what was reported; returns the lanes that may have something new to do."""
        touched = {lane.name: lane for lane in reported}
        ended = [operation for lane in reported for operation in lane.complete()]
        self._idle_samplers |= {lane.name: lane for lane in reported if Role.SAMPLE in lane.role}
        self.router.end([operation for operation in ended if operation.kind is Kind.SAMPLE])
        self.table.compute(ended)
        self.table.end(ended)
        for operation in arrived:
            self.table.add(operation, self.clock.now)
        for run_id in self.table.take_new_ready():
            name = self.placement.lane_of(run_id) if self.placement.has_choice else self._names[0]
            touched[name] = self.lanes[name]
        if self.router.has_choice:
            occupied = [lane.name for lane in self._shared if lane.job is not None and not lane.is_decoding]
            self.router.set_available(self._names, occupied)
        for operation in arrived:
            if operation.kind is Kind.SAMPLE:
                sampler = self.router.assign(operation)
                assert sampler is not None
                touched[sampler] = self.lanes[sampler]
                touched[sampler].cut()
        return touched, ended

    def _plan(self, touched: dict[str, SimulatedLane]) -> Sequence[tuple[SimulatedLane, Job]]:
        """What the idle lanes do next. A lane that nothing has happened to stays idle, as its controller would decide."""
        touched |= self._idle_samplers if any(self.table.queued_samples("").values()) else {}
        jobs = []
        for lane in touched.values():
            if lane.job is None and lane.name not in self._dispatching:
                job = lane.plan()
                if job is not None:
                    jobs.append((lane, job))
                    self._dispatching.add(lane.name)
                    self._idle_samplers.pop(lane.name, None)
        self.num_jobs += len(jobs)
        return jobs

    def _reporting_share(self) -> float:
        """The share of the control plane that decode jobs take by their reports between the events that are simulated.

        A decode job reports at least every 50 ms, and after its current step when anything arrives.
        """
        if not self.control.report_s or self.clock.now < self._share_until:
            return self._share
        self.report_busy_s += self._share * self.inside(self._share_since, self.clock.now)
        self._share_since, self._share_until = self.clock.now, self.clock.now + MAX_JOB_S
        decoding = [
            lane.job.steps[0][1] for lane in self._samplers if lane.job is not None and lane.job.steps
        ]
        if not decoding:
            self._share = 0.0
            return self._share
        step_s = sum(decoding) / len(decoding)
        interval = max(step_s, min(MAX_JOB_S, self._arrival_gap_s))
        share = len(decoding) * self.control.report_s / interval
        self._share = min(share, MAX_RHO)
        return self._share

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.process_time()
        yield
        self.scheduler_s += time.process_time() - start
