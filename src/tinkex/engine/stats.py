"""What the engine does and holds at the moment, in numbers."""

from __future__ import annotations

import shutil
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinkex.engine.lanes.interface import BatchStats, WorkerStatus
from tinkex.engine.operation import Kind
from tinkex.engine.running.table import OperationTable
from tinkex.engine.store import UsageKind

if TYPE_CHECKING:
    from tinkex.engine.engine import Engine
    from tinkex.engine.loop import EngineLoop


@dataclass(frozen=True)
class ModelStats:
    """One base model: what computes its samples (empty until it is loaded), and its decode batch."""

    name: str
    compute: str
    batch: BatchStats


@dataclass(frozen=True)
class EngineStats:
    """A snapshot of every gauge."""

    state: str
    troubles: Collection[str]
    uptime_s: float
    operations: Mapping[tuple[Kind, bool], int]
    """Operations by kind, and whether they run."""
    models: Collection[ModelStats]
    kv_limit_bytes: int
    used: Mapping[UsageKind, int]
    """Tokens and checkpoints since the start."""
    live_runs: int
    polls: int
    journal_rows: int
    savepoints: int
    savepoint_bytes: int
    checkpoint_bytes: int
    database_bytes: int
    free_disk_bytes: int
    worker: WorkerStatus | None
    """The worker process; None if the engine's own process computes."""


def read_stats(engine: Engine, table: OperationTable, loop: EngineLoop, uptime_s: float) -> EngineStats:
    """Read every gauge; safe on any thread."""
    store = engine.store
    savepoints = store.savepoints.all()
    database = store.database.path
    files = [database, database.with_name(f"{database.name}-wal")]
    return EngineStats(
        state=engine.health.state,
        troubles=engine.health.troubles,
        uptime_s=uptime_s,
        operations=table.depths(),
        models=_model_stats(engine, loop.batches.stats),
        kv_limit_bytes=engine.config.kv_cache_bytes,
        used=loop.committer.usage_totals,
        live_runs=loop.num_live_runs,
        polls=len(loop.waiters),
        journal_rows=len(store.journal),
        savepoints=len(savepoints),
        savepoint_bytes=sum(row.size_bytes for row in savepoints),
        checkpoint_bytes=store.checkpoints.total_bytes(None, time.time()),
        database_bytes=sum(file.stat().st_size for file in files if file.exists()),
        free_disk_bytes=shutil.disk_usage(store.root).free,
        worker=engine.backend.status,
    )


def _model_stats(engine: Engine, batches: Mapping[str, BatchStats]) -> Collection[ModelStats]:
    found: dict[str, ModelStats] = {}
    for name in engine.models.names:
        model = engine.models.find(name)
        compute = model.info.computes_with if model.known else ""
        found.setdefault(model.source, ModelStats(name, compute, batches.get(model.source, BatchStats())))
    return list(found.values())
