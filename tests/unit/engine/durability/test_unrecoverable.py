"""Runs that cannot be brought back end alone, health says so, and they are tried again at the next start."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.engine.durability.test_replay import data, logprobs, running, state_of, train, truncate
from tests.unit.engine.lanes.crashing import Condition, crashing_engine
from tests.unit.engine.test_engine import Caller, forward_backward, optim_step
from tinkex.errors import Expired
from tinkex.types import SaveWeightsRequest

PATIENCE_S = 120.0


@pytest.mark.slow
@pytest.mark.parametrize("damage", [truncate, Path.unlink])
def test_a_savepoint_that_is_put_back_brings_its_run_back(
    tiny_model: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    with running(tmp_path, tiny_model, savepoint_after_operations=2) as ada:
        runs = [ada.create(n) for n in range(2)]
        for run in runs:
            train(ada, run, range(1, 6))
        expected = state_of(ada, runs[0], 6)
        ada.engine.flush_savepoints()
        savepoint = ada.engine.store.savepoints.get(runs[0])
        assert savepoint is not None
    file = tmp_path / "engine" / savepoint.file
    shutil.copy(file, tmp_path / "backup")
    damage(file)
    for start in range(2):  # a start without it loses nothing
        with running(tmp_path, tiny_model) as ada:
            health = ada.engine.health.status
            assert health.startswith("degraded: 1 runs could not be restored"), health
            assert "Put missing files back, then start the server again" in health
            assert runs[0] not in health, "anybody may ask for it"
            with pytest.raises(Expired, match=runs[0]):
                ada.submit(optim_step(runs[0], 7))
            ada.run(optim_step(runs[1], 6 + start))
            ada.engine.run_retention()
            assert ada.engine.health.status == health
    shutil.copy(tmp_path / "backup", file)
    with running(tmp_path, tiny_model) as ada:
        assert ada.engine.health.status == "ok"
        row = ada.engine.store.runs.get(runs[0])
        assert row is not None
        assert row.status == "live"
        assert state_of(ada, runs[0], 7) == expected


def test_what_is_left_of_a_lost_run_goes_with_its_session(tiny_model: Path, tmp_path: Path) -> None:
    with running(tmp_path, tiny_model, savepoint_after_operations=1) as ada:
        run = ada.create()
        train(ada, run, range(1, 3))
        ada.engine.flush_savepoints()
        savepoint = ada.engine.store.savepoints.get(run)
        assert savepoint is not None
    truncate(tmp_path / "engine" / savepoint.file)
    with running(tmp_path, tiny_model, session_grace_s=0) as ada:
        engine = ada.engine
        assert engine.health.status.startswith("degraded")
        engine.store.sessions.finish("s", time.time() - 1, "success", None)
        engine.run_retention()
        assert engine.health.status == "ok"
        assert engine.store.savepoints.all() == []
        assert not engine.store.journal.runs()
        assert list((engine.store.root / "savepoints").iterdir()) == []


def test_checkpoints_without_files_are_reported_before_they_are_requested(
    tiny_model: Path, tmp_path: Path
) -> None:
    with running(tmp_path, tiny_model) as ada:
        run = ada.create()
        for number, name in enumerate(("kept", "gone", "later"), 1):
            ada.run(SaveWeightsRequest(model_id=run, seq_id=number, path=name))
    folder = tmp_path / "engine" / "checkpoints" / run.replace(":", "~") / "weights"
    shutil.rmtree(folder / "gone")
    with running(tmp_path, tiny_model) as ada:
        engine = ada.engine
        assert "files of checkpoints are missing or damaged (1 known); put them back" in engine.health.status
        shutil.rmtree(folder / "later")
        engine.run_retention()
        assert "(2 known)" in engine.health.status
        for checkpoint in engine.store.checkpoints.of_run(run, time.time()):
            if not checkpoint.path.endswith("kept"):
                engine.delete_checkpoint(checkpoint)
        engine.integrity.recheck(force=True)
        assert engine.health.status == "ok"


REPEATED = 1e-2
"""The learning rate of steps that are replayed; steps after the restart have another one."""


def replays_step_of(run: str) -> Condition:
    """Whether a call replays a step of a run."""
    return lambda call, argument: (
        call == "step" and argument[0] == run and argument[1].learning_rate == REPEATED
    )


@pytest.mark.slow
@pytest.mark.parametrize("whose", [0, 1])
def test_a_run_whose_replay_ends_the_worker_every_time_is_lost_alone(
    tiny_model: Path, tmp_path: Path, whose: int
) -> None:
    engine, _ = crashing_engine(tmp_path, tiny_model, threads=2)
    ada = Caller(engine)
    runs = [ada.create(n, seed=n) for n in range(3)]
    with engine.paused():
        # These share a pass; the third is independent of them.
        ids = [ada.submit(forward_backward(run, 1, data=data(1))) for run in runs[:2]]
    ids += [ada.submit(optim_step(run, 2)) for run in runs[:2]]
    train(ada, runs[2], range(1, 3))
    for request_id in ids:
        assert not ada.outcome(request_id).error
    assert engine.store.journal.runs_sharing_turns([runs[0]]) == set(runs[:2])
    path = ada.run(SaveWeightsRequest(model_id=runs[0], seq_id=3, path="kept"))["path"]
    expected = logprobs(ada, runs[2], 3)
    engine.close()

    engine, backend = crashing_engine(tmp_path, tiny_model, threads=2)
    ada = Caller(engine)
    poisonous, other = runs[0], runs[1]
    backend.crashes = replays_step_of(poisonous)
    outcome = ada.outcome(ada.submit(optim_step(runs[whose], 4 if whose == 0 else 3, learning_rate=1e-3)))
    assert len(backend.killed) == 3
    if whose == 0:
        assert path in outcome.error
    else:
        assert not outcome.error, "it came back without the one that ends the worker"
    with pytest.raises(Expired, match=path):
        ada.submit(optim_step(poisonous, 5))
    row = engine.store.runs.get(poisonous)
    assert row is not None
    assert row.status == "corrupted"
    assert engine.health.status.startswith("degraded: 1 runs could not be restored")
    assert not ada.outcome(ada.submit(optim_step(other, 4 if whose else 3))).error
    assert logprobs(ada, runs[2], 4) == expected
    engine.close()


@pytest.mark.slow
def test_a_replay_that_is_interrupted_resumes_unchanged(tiny_model: Path, tmp_path: Path) -> None:
    engine, _ = crashing_engine(tmp_path, tiny_model, threads=2)
    ada = Caller(engine)
    run = ada.create()
    train(ada, run, range(1, 5))
    expected = logprobs(ada, run, 5)
    engine.close()
    engine, backend = crashing_engine(tmp_path, tiny_model, threads=2)
    ada = Caller(engine)
    backend.number = signal.SIGKILL
    backend.crashes = lambda call, argument: len(backend.killed) < 4 and replays_step_of(run)(call, argument)
    assert logprobs(ada, run, 6) == expected
    assert len(backend.killed) == 4, "being killed from outside proves nothing against a run"
    engine.close()
