"""``GET /metrics``: metrics of the server in the Prometheus text format.

Only the operator may read them, with the server's own key in ``X-API-Key`` or as ``Authorization: Bearer``: they reveal
the activity of all users.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from tinkex.engine.api.request_metrics import BOUNDS_S, RequestMetrics
from tinkex.engine.engine import EngineStats
from tinkex.engine.operation import Kind
from tinkex.engine.store import UsageKind

if TYPE_CHECKING:
    from prometheus_client import Metric

    from tinkex.engine.sampler_pool import SamplerCounts

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

STATES = ("starting", "ready", "degraded")
TOKENS = {
    UsageKind.TRAINING: "trained",
    UsageKind.TRAINING_COMPUTED: "trained_computed",
    UsageKind.PREFILL: "prefilled",
    UsageKind.PREFILL_CACHED: "prompt_cache_hit",
    UsageKind.SAMPLE: "sampled",
}


def metrics_text(stats: EngineStats, request_metrics: RequestMetrics, version: str) -> str:
    """Returns all metrics as text."""
    # Only here: most programs with an engine in their process never ask for it.
    from prometheus_client import generate_latest
    from prometheus_client.registry import CollectorRegistry

    registry = CollectorRegistry()
    registry.register(_Families([*_engine(stats, version), *_requests(request_metrics)]))
    return generate_latest(registry).decode()


class _Families:
    """A collector of families that are known."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterable[Metric]:
        """Returns the families."""
        return self._families


def _engine(stats: EngineStats, version: str) -> Iterator[Metric]:
    yield _metric("tinkex_build_info", "gauge", "The running version.", [({"version": version}, 1)])
    yield _metric("tinkex_uptime_seconds", "gauge", "Time since the start.", stats.uptime_s)
    states = [({"state": state}, int(stats.state == state)) for state in STATES]
    yield _metric("tinkex_health", "gauge", "1 for the current state of the server.", states)
    troubles = [({"subject": subject}, 1) for subject in sorted(stats.troubles)]
    yield _metric("tinkex_trouble", "gauge", "Current problems by subject.", troubles)
    depths = [
        ({"kind": kind, "state": state}, stats.operations.get((kind, running), 0))
        for kind in Kind
        for state, running in (("waiting", False), ("running", True))
    ]
    yield _metric("tinkex_operations", "gauge", "Accepted operations that have no result yet.", depths)
    yield _metric("tinkex_polls", "gauge", "Open long polls.", stats.polls)
    yield _metric("tinkex_live_runs", "gauge", "Runs in memory.", stats.live_runs)
    yield _metric(
        "tinkex_live_bytes", "gauge", "Memory of runs: weights, gradients and moments.", stats.live_bytes
    )
    yield _metric("tinkex_live_limit_bytes", "gauge", "Limit of that memory.", stats.live_limit_bytes)
    yield _metric("tinkex_evictions_total", "counter", "Runs evicted to disk.", stats.evictions)
    yield from _models(stats)
    tokens = [({"what": what}, stats.used[kind]) for kind, what in TOKENS.items()]
    yield _metric(
        "tinkex_tokens_total",
        "counter",
        "Tokens of training passes as sent and as computed, and of samples as computed or found in the prompt cache.",
        tokens,
    )
    saved = stats.used[UsageKind.CHECKPOINT]
    yield _metric("tinkex_checkpoints_saved_total", "counter", "Checkpoints that users saved.", saved)
    yield _metric("tinkex_journal_rows", "gauge", "Journal entries since the savepoints.", stats.journal_rows)
    yield _metric("tinkex_savepoints", "gauge", "Savepoints of runs.", stats.savepoints)
    disk = [
        *(({"what": kind}, num_bytes) for kind, num_bytes in sorted(stats.stored_bytes.items())),
        ({"what": "database"}, stats.database_bytes),
        ({"what": "free"}, stats.free_disk_bytes),
    ]
    yield _metric(
        "tinkex_disk_bytes", "gauge", "What users store by kind, the database file, and free space.", disk
    )
    memory = _resident_bytes("self")
    if memory is not None:
        yield _metric("tinkex_resident_memory_bytes", "gauge", "Resident memory of the process.", memory)
    if stats.samplers is not None:
        yield from _samplers(stats.samplers)
    yield from _worker(stats)


def _samplers(counts: SamplerCounts) -> Iterator[Metric]:
    """The samplers whose number follows the load."""
    states = [({"state": state}, getattr(counts, state)) for state in ("running", "starting", "draining")]
    yield _metric("tinkex_samplers", "gauge", "Samplers, if their number follows the load.", states)
    limits = [({"limit": "min"}, counts.fewest), ({"limit": "max"}, counts.most)]
    yield _metric("tinkex_samplers_limit", "gauge", "Limits of their number.", limits)


def _worker(stats: EngineStats) -> Iterator[Metric]:
    """The worker processes; with several lanes, each has its name as a label."""
    workers = [(lane.name, lane.worker) for lane in stats.lanes if lane.worker is not None]
    if not workers:
        return
    several = len(stats.lanes) > 1 or stats.samplers is not None
    labels = {name: {"lane": name} if several else {} for name, _ in workers}
    running = [(labels[name], int(worker.state == "running")) for name, worker in workers]
    yield _metric("tinkex_worker_up", "gauge", "Whether the worker process runs.", running)
    restarts = [(labels[name], worker.restarts) for name, worker in workers]
    yield _metric("tinkex_worker_restarts_total", "counter", "Restarts of the worker process.", restarts)
    memory = [
        (labels[name], resident)
        for name, worker in workers
        if worker.pid is not None and (resident := _resident_bytes(str(worker.pid))) is not None
    ]
    yield _metric(
        "tinkex_worker_resident_memory_bytes", "gauge", "Resident memory of the worker process.", memory
    )


def _models(stats: EngineStats) -> Iterator[Metric]:
    loaded = [m for m in stats.models if m.compute]
    computes = [({"model": m.name, "compute": m.compute}, 1) for m in loaded]
    yield _metric(
        "tinkex_sampler_info", "gauge", "The sampler implementation of each loaded model.", computes
    )
    running = [({"model": m.name}, m.batch.num_sequences) for m in stats.models]
    yield _metric("tinkex_sequences", "gauge", "Sequences being decoded or prefilled.", running)
    preempted = [({"model": m.name}, m.batch.num_preemptions) for m in stats.models]
    yield _metric("tinkex_preemptions_total", "counter", "Preempted sequences.", preempted)
    kv = [({"model": m.name}, m.batch.kv_bytes) for m in stats.models]
    yield _metric("tinkex_kv_cache_bytes", "gauge", "Size of the KV cache.", kv)
    yield _metric(
        "tinkex_kv_cache_limit_bytes", "gauge", "Limit of the KV cache per model.", stats.kv_limit_bytes
    )


def _requests(request_metrics: RequestMetrics) -> Iterator[Metric]:
    counts = [
        ({"endpoint": endpoint, "status": str(status)}, count)
        for (endpoint, status), count in sorted(request_metrics.counts.items())
    ]
    yield _metric("tinkex_requests_total", "counter", "Requests by endpoint and status.", counts)
    events = [
        ({"event": event, "severity": severity}, count)
        for (event, severity), count in sorted(request_metrics.client_events.items())
    ]
    yield _metric("tinkex_client_reports_total", "counter", "Telemetry events of clients.", events)
    yield _durations(request_metrics)


def _durations(request_metrics: RequestMetrics) -> Metric:
    from prometheus_client.core import HistogramMetricFamily

    family = HistogramMetricFamily(
        "tinkex_request_duration_seconds", "Duration of requests, long polls included.", labels=["endpoint"]
    )
    bounds = [*(f"{bound:g}" for bound in BOUNDS_S), "+Inf"]
    for endpoint, durations in sorted(request_metrics.durations.items()):
        buckets = list(zip(bounds, map(float, accumulate(durations.counts)), strict=True))
        family.add_metric([endpoint], buckets, durations.total_s)
    return family


def _metric(
    name: str, kind: str, description: str, samples: float | Iterable[tuple[Mapping[str, str], float]]
) -> Metric:
    from prometheus_client import Metric

    # Its own classes of families take the names of labels once, and a worker has one only if there are several.
    family = Metric(name.removesuffix("_total"), description, kind)
    if isinstance(samples, int | float):
        samples = [({}, samples)]
    for labels, value in samples:
        family.add_sample(name, dict(labels), value)
    return family


def _resident_bytes(process: str) -> int | None:
    """Returns the resident memory of a process, or None where /proc does not have it."""
    try:
        pages = int(Path(f"/proc/{process}/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return None
    import resource

    return pages * resource.getpagesize()
