"""The page of metrics: every family with its name, type and labels, as scrapers and dashboards know them."""

from __future__ import annotations

import os

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.exposition import read_exposition
from tinkex.engine.api.metrics import metrics_text
from tinkex.engine.api.request_metrics import BOUNDS_S, RequestMetrics
from tinkex.engine.engine import EngineStats, LaneStats, ModelStats
from tinkex.engine.lanes.interface import BatchStats, WorkerStatus
from tinkex.engine.operation import Kind
from tinkex.engine.sampler_pool import SamplerCounts
from tinkex.engine.store import UsageKind

FAMILIES = {
    "tinkex_build_info": ("gauge", {"version"}),
    "tinkex_uptime_seconds": ("gauge", set()),
    "tinkex_health": ("gauge", {"state"}),
    "tinkex_trouble": ("gauge", {"subject"}),
    "tinkex_operations": ("gauge", {"kind", "state"}),
    "tinkex_polls": ("gauge", set()),
    "tinkex_live_runs": ("gauge", set()),
    "tinkex_live_bytes": ("gauge", set()),
    "tinkex_live_limit_bytes": ("gauge", set()),
    "tinkex_evictions_total": ("counter", set()),
    "tinkex_sampler_info": ("gauge", {"model", "compute"}),
    "tinkex_sequences": ("gauge", {"model"}),
    "tinkex_preemptions_total": ("counter", {"model"}),
    "tinkex_kv_cache_bytes": ("gauge", {"model"}),
    "tinkex_kv_cache_limit_bytes": ("gauge", set()),
    "tinkex_tokens_total": ("counter", {"what"}),
    "tinkex_checkpoints_saved_total": ("counter", set()),
    "tinkex_journal_rows": ("gauge", set()),
    "tinkex_savepoints": ("gauge", set()),
    "tinkex_disk_bytes": ("gauge", {"what"}),
    "tinkex_resident_memory_bytes": ("gauge", set()),
    "tinkex_samplers": ("gauge", {"state"}),
    "tinkex_samplers_limit": ("gauge", {"limit"}),
    "tinkex_worker_up": ("gauge", {"lane"}),
    "tinkex_worker_restarts_total": ("counter", {"lane"}),
    "tinkex_worker_resident_memory_bytes": ("gauge", {"lane"}),
    "tinkex_requests_total": ("counter", {"endpoint", "status"}),
    "tinkex_client_reports_total": ("counter", {"event", "severity"}),
    "tinkex_request_duration_seconds": ("histogram", {"endpoint"}),
}
"""What servers have offered since metrics exist."""
SAMPLERS = SamplerCounts(running=2, starting=1, draining=0, fewest=1, most=4)


@pytest.fixture
def text() -> str:
    return page()


def page(num_workers: int = 2, samplers: SamplerCounts | None = SAMPLERS) -> str:
    model = ModelStats('a "b"\n\\c', "compiled core", BatchStats(3, 4096, 1))
    worker = WorkerStatus(os.getpid(), "running", 2)
    lanes = [LaneStats(f"trainer-{n}", is_busy=False, worker=worker) for n in range(num_workers)]
    stats = EngineStats(
        state="degraded", troubles=["disk"], uptime_s=12.5, operations={(Kind.SAMPLE, True): 7}, models=[model],
        kv_limit_bytes=2**31, used=dict.fromkeys(UsageKind, 5), live_runs=2, live_bytes=100, live_limit_bytes=200,
        evictions=3, polls=4, journal_rows=6, savepoints=1, stored_bytes={"checkpoints": 2**40}, database_bytes=4096,
        free_disk_bytes=10**12, lanes=lanes, samplers=samplers,
    )  # fmt: skip
    requests = RequestMetrics()
    for seconds in (0.001, 0.2, 100.0):
        requests.record("optim_step", 200, seconds, "id", "ada")
    requests.record_client_events([{"event": "SESSION_START", "severity": "INFO"}])
    return metrics_text(stats, requests, "1.2.3")


def test_every_family_has_the_name_type_and_labels_that_scrapers_know(text: str) -> None:
    found = {}
    for family in text_string_to_metric_families(text):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        found[name] = (family.type, labels)
        assert family.documentation
    assert found == FAMILIES


def test_the_page_is_one_that_a_strict_scraper_reads(text: str) -> None:
    series = read_exposition(text)
    assert series["tinkex_evictions_total"] == 3
    assert series['tinkex_samplers{state="running"}'] == 2
    assert series['tinkex_samplers_limit{limit="max"}'] == 4
    assert series['tinkex_operations{kind="sample",state="running"}'] == 7
    assert series['tinkex_disk_bytes{what="checkpoints"}'] == 2**40
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    named = {sample.name: sample for sample in samples if "model" in sample.labels}
    assert named["tinkex_sequences"].labels == {"model": 'a "b"\n\\c'}


def test_buckets_count_up_to_their_bounds(text: str) -> None:
    [durations] = [f for f in text_string_to_metric_families(text) if f.type == "histogram"]
    buckets = {s.labels["le"]: s.value for s in durations.samples if s.name.endswith("_bucket")}
    assert [*buckets] == [*(f"{bound:g}" for bound in BOUNDS_S), "+Inf"]
    assert (buckets["0.005"], buckets["0.25"], buckets["30"], buckets["+Inf"]) == (1, 2, 2, 3)
    rest = {s.name.rpartition("_")[2]: s.value for s in durations.samples if not s.name.endswith("_bucket")}
    assert rest == {"count": 3, "sum": pytest.approx(100.201)}


def test_a_single_worker_has_no_label() -> None:
    assert "tinkex_worker_up 1" in page(num_workers=1, samplers=None)
    assert "tinkex_worker_up{" not in page(num_workers=1, samplers=None)
    assert "tinkex_worker_up" not in page(num_workers=0)
