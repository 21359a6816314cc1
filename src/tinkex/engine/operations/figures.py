"""What the engine does and holds at the moment, in numbers for whoever watches it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Collection, Mapping, Sized
from dataclasses import dataclass

from tinkex.engine.backend.seam import Backend, Batch, WorkerStatus
from tinkex.engine.config import EngineConfig
from tinkex.engine.operations.backlog import Backlog
from tinkex.engine.operations.decoding import Decoding
from tinkex.engine.operations.health import Health
from tinkex.engine.operations.metering import Metering
from tinkex.engine.operations.served import ServedModels
from tinkex.engine.scheduler import Kind
from tinkex.engine.store import Store, UsageKind


@dataclass(frozen=True)
class ModelFigures:
    """One base model: what computes its samples (empty until it is in memory), and what they hold."""

    name: str
    compute: str
    batch: Batch


@dataclass(frozen=True)
class Figures:
    """A reading of every gauge."""

    state: str
    troubles: Collection[str]
    uptime_s: float
    operations: Mapping[tuple[Kind, bool], int]
    """Operations by kind, and whether they run."""
    models: Collection[ModelFigures]
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
    """The process that computes; None if it is this one."""


class Gauges:
    """Reads what the parts of an engine tell about themselves. Safe to use from any thread."""

    def __init__(
        self,
        config: EngineConfig,
        store: Store,
        backend: Backend,
        models: ServedModels,
        backlog: Backlog,
        decoding: Decoding,
        metering: Metering,
        live: Sized,
        health: Health,
        polls: Sized,
    ) -> None:
        self._config = config
        self._store = store
        self._backend = backend
        self._models = models
        self._backlog = backlog
        self._decoding = decoding
        self._metering = metering
        self._live = live
        self._health = health
        self._polls = polls
        self._started = time.monotonic()

    def read(self) -> Figures:
        """What they tell now."""
        store = self._store
        savepoints = store.savepoints.all()
        database = store.database.path
        files = [database, database.with_name(f"{database.name}-wal")]
        return Figures(
            state=self._health.state,
            troubles=self._health.troubles,
            uptime_s=time.monotonic() - self._started,
            operations=self._backlog.depths(),
            models=self._model_figures(),
            kv_limit_bytes=self._config.kv_cache_bytes,
            used=self._metering.totals,
            live_runs=len(self._live),
            polls=len(self._polls),
            journal_rows=len(store.journal),
            savepoints=len(savepoints),
            savepoint_bytes=sum(row.size_bytes for row in savepoints),
            checkpoint_bytes=store.checkpoints.total_bytes(None, time.time()),
            database_bytes=sum(file.stat().st_size for file in files if file.exists()),
            free_disk_bytes=shutil.disk_usage(store.root).free,
            worker=self._backend.status,
        )

    def _model_figures(self) -> Collection[ModelFigures]:
        found: dict[str, ModelFigures] = {}
        for name in self._models.names:
            base = self._models.find(name)
            compute = base.facts.computes_with if base.loaded else ""
            batch = self._decoding.batches.get(base.source, Batch())
            found.setdefault(base.source, ModelFigures(name, compute, batch))
        return list(found.values())
