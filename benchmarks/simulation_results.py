"""What a simulation is summarised by: utilisation, waits, fairness, and what the control plane and the scheduler took."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from simulation_cluster import Cluster

from tinkex.engine.lanes.roles import Role
from tinkex.engine.operation import Kind

MIN_OPERATIONS = 5
"""How many operations users must have sent, on average, for their shares to be compared."""
MAX_BUSY = 0.95
"""A control plane that is busier has no room left."""
MAX_BACKLOG_S = 1.0
"""What the control plane may have left to do at the end."""
COLUMNS = (
    "workload",
    "costs",
    "control",
    "lanes",
    "users",
    "load",
    "operations",
    "trainers",
    "samplers",
    "batch",
    "train p50",
    "train p99",
    "sample p50",
    "sample p99",
    "Jain",
    "control",
    "µs/op",
)


@dataclass(frozen=True)
class Result:
    """One simulation; times in seconds, shares from 0 to 1, None for what there was nothing of."""

    workload: str
    costs: str
    is_estimate: bool
    control: str
    lanes: int
    trainers: int
    samplers: int
    users: int
    load: float | None
    virtual_s: float
    operations: int
    operations_per_s: float
    trainer_utilisation: float | None
    sampler_utilisation: float | None
    batch_occupancy: float | None
    """The share of the places of all decode batches that were taken."""
    train_wait_p50: float | None
    train_wait_p99: float | None
    sample_wait_p50: float | None
    sample_wait_p99: float | None
    jain: float | None
    control_utilisation: float
    reporting_share: float
    """What reports of decode jobs take of the control plane."""
    is_saturated: bool
    scheduler_us_per_operation: float
    real_s: float


def summarise(cluster: Cluster, *, workload: str, users: int, load: float | None, real_s: float) -> Result:
    """The result of a simulation that has run over its window."""
    start, end = cluster.window
    span = end - start
    records = cluster.records
    train = [each.started - each.submitted for each in records if each.kind is Kind.FORWARD_BACKWARD]
    sample = [each.started - each.submitted for each in records if each.kind is Kind.SAMPLE]
    control = (cluster.control_busy_s + cluster.report_busy_s) / span
    lanes = list(cluster.lanes.values())
    both = [lane.busy_s / span for lane in lanes]
    trainers = [share for lane, share in zip(lanes, both, strict=True) if Role.TRAIN in lane.role]
    samplers = [share for lane, share in zip(lanes, both, strict=True) if Role.SAMPLE in lane.role]
    return Result(
        workload=workload,
        costs=cluster.costs.name,
        is_estimate=cluster.costs.is_estimate,
        control=cluster.control.name,
        lanes=len(lanes),
        trainers=cluster.trainers,
        samplers=cluster.samplers,
        users=users,
        load=load,
        virtual_s=span,
        operations=len(records),
        operations_per_s=len(records) / span,
        trainer_utilisation=sum(trainers) / len(trainers) if trainers and train else None,
        sampler_utilisation=sum(samplers) / len(samplers) if samplers and sample else None,
        batch_occupancy=_occupancy(cluster, span) if sample else None,
        train_wait_p50=percentile(train, 0.5),
        train_wait_p99=percentile(train, 0.99),
        sample_wait_p50=percentile(sample, 0.5),
        sample_wait_p99=percentile(sample, 0.99),
        jain=fairness(cluster),
        control_utilisation=min(control, 1.0),
        reporting_share=cluster.report_busy_s / span,
        is_saturated=control > MAX_BUSY or cluster.backlog_s > MAX_BACKLOG_S,
        scheduler_us_per_operation=1e6 * cluster.scheduler_s / max(cluster.num_submitted, 1),
        real_s=real_s,
    )


def _occupancy(cluster: Cluster, span: float) -> float:
    samplers = [lane for lane in cluster.lanes.values() if Role.SAMPLE in lane.role]
    places = len(samplers) * cluster.costs.max_decode_batch
    return sum(lane.sequence_s for lane in samplers) / (places * span)


def fairness(cluster: Cluster) -> float | None:
    """The Jain index of what equal users were served, the lowest of the kinds of users.

    Of each user it is the tokens served for a second in which it had something unfinished. None for users who sent too little to tell.
    """
    tokens: dict[str, float] = defaultdict(float)
    spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for each in cluster.records:
        tokens[each.owner] += each.tokens
        spans[each.owner].append((each.submitted, each.ended))
    kinds: dict[str, list[float]] = defaultdict(list)
    for owner, served in tokens.items():
        kinds[owner.split("-")[0]].append(served / max(covered(spans[owner]), 1e-9))
    if len(cluster.records) < MIN_OPERATIONS * len(tokens):
        return None
    return min((jain(rates) for rates in kinds.values() if len(rates) > 1), default=None)


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """How long at least one of the intervals lasts.

    >>> covered([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)])
    4.0
    """
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def jain(values: Collection[float]) -> float:
    """1 if all are equal, 1/n if one has everything.

    >>> jain([3.0, 3.0, 3.0]), jain([1.0, 0.0, 0.0, 0.0])
    (1.0, 0.25)
    """
    squares = len(values) * sum(value * value for value in values)
    return sum(values) ** 2 / squares if squares else 1.0


def percentile(values: Sequence[float], share: float) -> float | None:
    """A value that so many are not above, or None without any."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else None


def header() -> str:
    """The head of the table."""
    return f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}"


def row(result: Result) -> str:
    """A result as a row of the table."""
    cells = [
        result.workload,
        result.costs + (" (estimate)" if result.is_estimate else ""),
        result.control,
        f"{result.lanes:,}",
        f"{result.users:,}",
        "" if result.load is None else f"{result.load:g}",
        f"{result.operations:,}",
        _percent(result.trainer_utilisation),
        _percent(result.sampler_utilisation),
        _percent(result.batch_occupancy),
        *map(_seconds, (result.train_wait_p50, result.train_wait_p99)),
        *map(_seconds, (result.sample_wait_p50, result.sample_wait_p99)),
        "" if result.jain is None else f"{result.jain:.2f}",
        "saturated" if result.is_saturated else _percent(result.control_utilisation),
        f"{result.scheduler_us_per_operation:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} s" if value < 100 else f"{value:,.0f} s"
