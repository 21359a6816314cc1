"""What the engine does and holds at the moment, in numbers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from tinkex.engine.lanes.interface import BatchStats, WorkerStatus
from tinkex.engine.operation import Kind
from tinkex.engine.store import UsageKind


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
