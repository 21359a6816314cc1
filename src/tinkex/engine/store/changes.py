"""The changes an operation makes to the store besides its outcome, as values that one commit applies."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TypeAlias

from tinkex.engine.store.checkpoints import CheckpointRow
from tinkex.engine.store.runs import RunStatus
from tinkex.engine.store.samplers import SamplerRow, SnapshotRow
from tinkex.engine.store.savepoints import SavepointRow
from tinkex.engine.store.store import Store
from tinkex.types.training import LoraConfig


@dataclass(frozen=True)
class RunLive:
    """The weights of a run exist."""

    run_id: str
    base_model: str
    lora: LoraConfig


@dataclass(frozen=True)
class RunEnded:
    """The weights of a run no longer exist."""

    run_id: str
    status: RunStatus


@dataclass(frozen=True)
class SamplerCreated:
    """A sampler was created from an unnamed snapshot, which may be new."""

    sampler: SamplerRow
    snapshot: SnapshotRow


@dataclass(frozen=True)
class SavepointsWritten:
    """Savepoints of a group of runs after ``turn``; runs in ``run_ids`` without a savepoint have ended."""

    savepoints: Sequence[SavepointRow]
    run_ids: AbstractSet[str]
    turn: int


Change: TypeAlias = RunLive | RunEnded | CheckpointRow | SamplerCreated | SavepointsWritten
"""The row of a checkpoint is one that was written; it may replace another."""


@dataclass(frozen=True)
class Obsolete:
    """Files that are unreferenced once the commit has succeeded."""

    weights: Sequence[str] = ()
    savepoints: Sequence[str] = ()


def apply(store: Store, change: Change) -> Obsolete:
    """Apply a change inside the caller's transaction; returns the files that become unreferenced."""
    match change:
        case RunLive():
            store.runs.set_live(change.run_id, change.base_model, change.lora)
        case RunEnded():
            store.runs.set_status(change.run_id, change.status)
        case SamplerCreated():
            store.samplers.add_snapshot(change.snapshot)
            store.samplers.add(change.sampler)
        case CheckpointRow():
            replaced = store.checkpoints.put(change)
            return Obsolete(weights=[replaced] if replaced is not None else [])
        case SavepointsWritten():
            return Obsolete(savepoints=_replace_savepoints(store, change))
    return Obsolete()


def _replace_savepoints(store: Store, change: SavepointsWritten) -> Sequence[str]:
    """Replace savepoints and prune the journal they cover, including that of runs that have ended."""
    replaced = [store.savepoints.put(row) for row in change.savepoints]
    for row in change.savepoints:
        store.journal.prune(row.run_id, through_turn=change.turn, next_seq=row.next_seq)
    for run_id in change.run_ids - {row.run_id for row in change.savepoints}:
        store.journal.delete_run(run_id)
        replaced.append(store.savepoints.delete(run_id))
    return [file for file in replaced if file is not None]
