from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tinkex.engine.durability.commit import Commit, Committer
from tinkex.engine.encoding import succeeded
from tinkex.engine.health import Health
from tinkex.engine.operation import Kind, Operation
from tinkex.engine.store import FutureRow, FutureStatus, JournalRow, SamplerRow, Store
from tinkex.engine.store.changes import SamplerCreated
from tinkex.engine.store.samplers import SnapshotRow
from tinkex.types import OptimStepResponse


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path)
    yield store
    store.close()


def computed(store: Store, name: str) -> Operation:
    """An accepted operation of a run of its own that has an outcome."""
    operation = Operation(name, "ada", "tiny", f"run-{name}", 1, Kind.OPTIM_STEP, 0)
    store.futures.accept(FutureRow(name, "ada", operation.kind, operation.run_id, 1, b"", 0.0))
    store.journal.accept(JournalRow(name, operation.run_id, 1, "ada", operation.kind, 0, b"{}"))
    operation.outcome, operation.ran = succeeded(OptimStepResponse(metrics={})), True
    return operation


def test_commits_that_are_made_together_have_turns_of_their_own(store: Store) -> None:
    committer = Committer(store, Health())
    commits = [Commit([computed(store, name)], turn) for turn, name in enumerate("abc", 1)]
    assert committer.commit(*commits) == commits
    assert [entry.turn for entry in store.journal.turns(["run-a", "run-b", "run-c"])] == [1, 2, 3]
    assert all(outcome is not None for outcome in map(store.futures.outcome, "abc"))
    assert not committer.waiting


def test_an_operation_whose_records_contradict_fails_alone(store: Store) -> None:
    sampler = SamplerRow("s:sample:1", "no session", "ada", "tiny", 0.0, directory="snapshots/x")
    created = SamplerCreated(sampler, SnapshotRow("snapshots/x", "run-b", "ada", 0.0, 10))
    committer = Committer(store, Health())
    contradicting = Commit([computed(store, "b")], 2, [created])
    done = committer.commit(
        Commit([computed(store, "a")], 1), contradicting, Commit([computed(store, "c")], 3)
    )
    assert len(done) == 3
    statuses = {
        name: outcome.status for name in "abc" if (outcome := store.futures.outcome(name)) is not None
    }
    assert statuses == {"a": FutureStatus.DONE, "b": FutureStatus.FAILED, "c": FutureStatus.DONE}
