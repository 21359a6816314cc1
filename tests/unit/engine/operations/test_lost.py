"""Runs that cannot be brought back end alone, health says so, and they are tried again at the next start."""

from __future__ import annotations

import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.engine.operations.test_replay import data, logprobs, running, state_of, train, truncate
from tests.unit.engine.test_core import Caller, config, forward_backward, optim_step
from tinkex.engine.backend.remote import ProcessBackend
from tinkex.engine.core import Engine
from tinkex.engine.operations.backlog import Operation
from tinkex.engine.operations.execution import Ended
from tinkex.engine.scheduler import Kind, Work
from tinkex.errors import Expired
from tinkex.types import SaveWeightsRequest

PATIENCE_S = 120.0


@pytest.mark.parametrize("damage", [truncate, Path.unlink])
def test_a_savepoint_that_is_put_back_brings_its_run_back(
    tiny_model: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    with running(tmp_path, tiny_model, savepoint_after_operations=2) as ada:
        runs = [ada.create(n) for n in range(2)]
        for run in runs:
            train(ada, run, range(1, 6))
        ada.engine._worker.call(ada.engine._keeper.flush).result()
        expected = state_of(ada, runs[0], 6)
        savepoint = ada.engine.store.savepoints.get(runs[0])
        assert savepoint is not None
    file = tmp_path / "engine" / savepoint.file
    shutil.copy(file, tmp_path / "backup")
    damage(file)
    for _ in range(2):  # a start without it loses nothing
        with running(tmp_path, tiny_model) as ada:
            health = ada.engine.health.status
            assert health.startswith("degraded: 1 runs could not be restored"), health
            assert "Put missing files back, then start the server again" in health
            assert runs[0] not in health, "anybody may ask for it"
            with pytest.raises(Expired, match=runs[0]):
                ada.submit(optim_step(runs[0], 7))
            ada.run(optim_step(runs[1], ada.engine._backlog.expected(runs[1])))
            ada.engine._worker.call(ada.engine._maintenance.run).result()
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
        ada.engine._worker.call(ada.engine._keeper.flush).result()
        savepoint = ada.engine.store.savepoints.get(run)
        assert savepoint is not None
    truncate(tmp_path / "engine" / savepoint.file)
    with running(tmp_path, tiny_model, session_grace_s=0) as ada:
        engine = ada.engine
        assert engine.health.status.startswith("degraded")
        engine.store.sessions.finish("s", time.time() - 1, "success", None)
        engine._worker.call(engine._maintenance.run).result()
        assert engine.health.status == "ok"
        assert engine.store.savepoints.all() == []
        assert not engine.store.journal.runs()
        assert list((engine.store.root / "savepoints").iterdir()) == []


def test_checkpoints_without_files_are_told_before_anybody_asks_for_them(
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
        engine._worker.call(engine._maintenance.run).result()
        assert "(2 known)" in engine.health.status
        for checkpoint in engine.store.checkpoints.of_run(run, time.time()):
            if not checkpoint.path.endswith("kept"):
                engine.delete_checkpoint(checkpoint)
        engine.admission.intact._look_again = 0.0
        engine.admission.intact.look_again()
        assert engine.health.status == "ok"


ALIKE: dict[str, Any] = {"threads": 2, "worker": "process"}


def opened(home: Path, model: Path) -> Engine:
    engine = Engine(config(home, model, **ALIKE))
    engine.start()
    engine.load_models().result(PATIENCE_S)
    return engine


def die_when_a_step_is_repeated(engine: Engine, run: str, number: signal.Signals, times: int) -> list[int]:
    """Ends the worker whenever a step of this run is to be repeated, so many times; returns those that were ended."""
    backend, run_alone = engine.backend, engine._operations.run_alone
    assert isinstance(backend, ProcessBackend)
    ended: list[int] = []

    def deadly(work: Work[Operation]) -> Ended:
        if engine._reviving and work.run_id == run and work.kind is Kind.OPTIM_STEP and len(ended) < times:
            worker = backend._child
            assert worker is not None
            worker.process.send_signal(number)
            assert worker.exited.wait(PATIENCE_S)
            ended.append(worker.process.pid)
        return run_alone(work)

    engine._operations.run_alone = deadly  # type: ignore[method-assign]
    return ended


@pytest.mark.parametrize("whose", [0, 1])
def test_a_run_whose_replay_ends_the_worker_every_time_is_lost_alone(
    tiny_model: Path, tmp_path: Path, whose: int
) -> None:
    engine = opened(tmp_path, tiny_model)
    ada = Caller(engine)
    runs = [ada.create(n, seed=n) for n in range(3)]
    go_on, ids = threading.Event(), []
    engine._worker.call(go_on.wait)
    # These share a pass; the third has nothing to do with them.
    ids += [ada.submit(forward_backward(run, 1, data=data(1))) for run in runs[:2]]
    go_on.set()
    ids += [ada.submit(optim_step(run, 2)) for run in runs[:2]]
    train(ada, runs[2], range(1, 3))
    for request_id in ids:
        assert not ada.outcome(request_id).error
    assert engine.store.journal.entangled([runs[0]]) == set(runs[:2])
    path = ada.run(SaveWeightsRequest(model_id=runs[0], seq_id=3, path="kept"))["path"]
    expected = logprobs(ada, runs[2], 3)
    engine.close()

    engine = opened(tmp_path, tiny_model)
    ada = Caller(engine)
    poisonous, other = runs[0], runs[1]
    ended = die_when_a_step_is_repeated(engine, poisonous, signal.SIGSEGV, 100)
    outcome = ada.outcome(ada.submit(optim_step(runs[whose], 4 if whose == 0 else 3)))
    assert len(ended) == 3
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


def test_a_replay_that_somebody_ends_goes_on_as_it_was(tiny_model: Path, tmp_path: Path) -> None:
    engine = opened(tmp_path, tiny_model)
    ada = Caller(engine)
    run = ada.create()
    train(ada, run, range(1, 5))
    expected = logprobs(ada, run, 5)
    engine.close()
    engine = opened(tmp_path, tiny_model)
    ada = Caller(engine)
    ended = die_when_a_step_is_repeated(engine, run, signal.SIGKILL, 2)
    assert logprobs(ada, run, 6) == expected
    assert len(ended) == 2
    engine.close()
