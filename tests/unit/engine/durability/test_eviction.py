"""Runs that do not fit in memory are evicted to disk, and come back bit for bit."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from tests.unit.engine.durability.test_replay import data, running
from tests.unit.engine.test_engine import Caller, forward_backward, optim_step
from tinkex.engine.engine import EngineStats
from tinkex.engine.store import RunStatus
from tinkex.errors import InvalidInput, OverQuota
from tinkex.types import LoadWeightsRequest, SaveWeightsRequest

pytestmark = pytest.mark.slow

NUM_RUNS = 5
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def run_bytes(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> int:
    """The memory of one run of :meth:`Caller.create`."""
    with running(tmp_path_factory.mktemp("size"), tiny_model) as ada:
        ada.create()
        return ada.engine.stats().live_bytes


def wait_for_stats(ada: Caller, holds: Callable[[EngineStats], bool]) -> EngineStats:
    deadline = time.monotonic() + PATIENCE_S
    while not holds(stats := ada.engine.stats()):
        assert time.monotonic() < deadline, stats
        time.sleep(0.01)
    return stats


def saved(ada: Caller, run: str, seq_id: int) -> dict[str, bytes]:
    """The weights and moments of a run, as it saves them."""
    ada.run(SaveWeightsRequest(model_id=run, path=f"n{seq_id}", seq_id=seq_id))
    (row,) = ada.engine.store.checkpoints.of_run(run, time.time())
    directory = ada.engine.store.directories.resolve(row.directory)
    tensors = {
        **load_file(directory / "adapter_model.safetensors"),
        **load_file(directory / "optimizer.safetensors"),
    }
    return {name: tensor.tobytes() for name, tensor in tensors.items()}


def train_in_turns(ada: Caller, max_bytes: int | None = None) -> list[Any]:
    """Every run gets two passes, then a step, with all others between any two of them; returns all that can be compared."""
    results: list[Any] = []
    runs = [ada.create(number, seed=number) for number in range(NUM_RUNS)]
    for seq_id in range(1, 10):
        for number, run in enumerate(runs):
            if seq_id % 3:
                output = ada.run(forward_backward(run, seq_id, data=data(7 * seq_id + number)))
                results.append(output.loss_fn_outputs[0]["logprobs"].to_numpy().tobytes())
            else:
                results.append(ada.run(optim_step(run, seq_id))["metrics"])
            if max_bytes is not None:
                assert ada.engine.stats().live_bytes <= max_bytes
    for run in runs:  # with a gradient that no step has used
        ada.run(forward_backward(run, 10, data=data(1)))
    results += [ada.run(optim_step(run, 11))["metrics"] for run in runs]
    return [*results, *(saved(ada, run, 12) for run in runs)]


@pytest.mark.parametrize("worker", ["thread", "process"])
def test_runs_that_do_not_fit_give_the_same_results_bit_for_bit(
    worker: str, run_bytes: int, tiny_model: Path, tmp_path: Path
) -> None:
    with running(tmp_path / "room", tiny_model, worker=worker) as ada:
        expected = train_in_turns(ada)
        stats = ada.engine.stats()
        assert (stats.live_runs, stats.live_bytes, stats.evictions) == (NUM_RUNS, NUM_RUNS * run_bytes, 0)
    with running(tmp_path / "tight", tiny_model, worker=worker, max_live_bytes=2 * run_bytes) as ada:
        assert train_in_turns(ada, 2 * run_bytes) == expected
        assert ada.engine.stats().evictions > NUM_RUNS


@pytest.mark.parametrize("limit", ["max_live_bytes", "max_live_runs"])
def test_idle_runs_make_room_for_new_ones(
    limit: str, run_bytes: int, tiny_model: Path, tmp_path: Path
) -> None:
    with running(tmp_path, tiny_model, **{limit: 2 * (run_bytes if limit == "max_live_bytes" else 1)}) as ada:
        runs = [ada.create(number) for number in range(5)]
        stats = ada.engine.stats()
        assert (stats.live_runs, stats.evictions) == (2, 3)
        for run in runs:  # each is there when it is used
            ada.run(forward_backward(run, 1))
        assert ada.engine.stats().live_runs == 2


def test_several_runs_are_evicted_for_a_large_one(run_bytes: int, tiny_model: Path, tmp_path: Path) -> None:
    with running(tmp_path, tiny_model, max_live_bytes=4 * run_bytes) as ada:
        for number in range(4):
            ada.create(number)
        large = ada.create(4, rank=12)
        stats = ada.engine.stats()
        assert (stats.live_runs, stats.live_bytes, stats.evictions) == (2, 4 * run_bytes, 3)
        saved_as = ada.run(SaveWeightsRequest(model_id=large, path="large", seq_id=1))["path"]
        ada.create(5)
        # One that is created from a checkpoint has the size of the checkpoint.
        ada.run(LoadWeightsRequest(path=saved_as, session_id=ada.session, model_seq_id=6, optimizer=False))
        assert ada.engine.stats().live_bytes <= 4 * run_bytes


def test_the_least_recently_used_run_is_evicted_first(
    run_bytes: int, tiny_model: Path, tmp_path: Path
) -> None:
    with running(tmp_path, tiny_model, max_live_bytes=2 * run_bytes) as ada:
        first, second = ada.create(0), ada.create(1)
        ada.run(forward_backward(first, 1))
        ada.create(2)
        evicted = ada.engine.stats().evictions
        ada.run(forward_backward(first, 2))
        assert ada.engine.stats().evictions == evicted, "it was in memory"
        ada.run(forward_backward(second, 1))
        assert ada.engine.stats().evictions == evicted + 1


def test_a_run_without_operations_is_evicted_before_one_that_has_some(
    run_bytes: int, tiny_model: Path, tmp_path: Path
) -> None:
    with running(tmp_path, tiny_model, max_live_bytes=2 * run_bytes) as ada:
        waiting, idle = ada.create(0), ada.create(1)
        parked = ada.submit(forward_backward(waiting, 2))  # its number 1 is missing
        ada.create(2)
        evicted = ada.engine.stats().evictions
        ada.run(forward_backward(waiting, 1))
        assert not ada.outcome(parked).error
        assert ada.engine.stats().evictions == evicted
        ada.run(forward_backward(idle, 1))


def test_a_pass_has_no_more_runs_than_fit(run_bytes: int, tiny_model: Path, tmp_path: Path) -> None:
    with running(tmp_path, tiny_model, max_live_bytes=2 * run_bytes) as ada:
        runs = [ada.create(number) for number in range(NUM_RUNS)]
        with ada.engine.paused():
            ids = [ada.submit(forward_backward(run, 1)) for run in runs]
            ids += [ada.submit(optim_step(run, 2)) for run in runs]
        for request_id in ids:
            assert not ada.outcome(request_id).error
            assert ada.engine.stats().live_bytes <= 2 * run_bytes


def test_runs_that_shared_passes_are_the_same_after_eviction_and_restart(
    run_bytes: int, tiny_model: Path, tmp_path: Path
) -> None:
    def share_passes(ada: Caller, runs: list[str], numbers: range) -> None:
        with ada.engine.paused():
            ids = [ada.submit(forward_backward(run, n, data=data(n))) for n in numbers for run in runs]
        for request_id in ids:
            assert not ada.outcome(request_id).error

    results = []
    for home, settings in (("room", {}), ("tight", {"max_live_bytes": 2 * run_bytes})):
        with running(tmp_path / home, tiny_model, **settings) as ada:
            runs = [ada.create(number, seed=number) for number in range(2)]
            share_passes(ada, runs, range(1, 4))
            ada.create(2)  # evicts one of them
            ada.create(3)
            share_passes(ada, runs, range(4, 6))
        with running(tmp_path / home, tiny_model, **settings) as ada:
            for run in runs:
                ada.run(optim_step(run, 6))
            results.append([saved(ada, run, 7) for run in runs])
    assert results[0] == results[1]


def test_runs_that_are_replayed_together_exceed_a_lower_limit_for_one_job_only(
    run_bytes: int, tiny_model: Path, tmp_path: Path
) -> None:
    with running(tmp_path, tiny_model) as ada:
        runs = [ada.create(number) for number in range(3)]
        with ada.engine.paused():
            ids = [ada.submit(forward_backward(run, 1)) for run in runs]
        for request_id in ids:
            assert not ada.outcome(request_id).error
    with running(tmp_path, tiny_model, max_live_bytes=run_bytes) as ada:
        ada.run(optim_step(runs[0], 2))
        wait_for_stats(ada, lambda stats: stats.live_bytes <= run_bytes)
        for run in runs[1:]:
            ada.run(optim_step(run, 2))


def test_a_run_that_never_fits_is_rejected(run_bytes: int, tiny_model: Path, tmp_path: Path) -> None:
    with running(tmp_path, tiny_model, max_live_bytes=run_bytes) as ada:
        with pytest.raises(AssertionError, match="max_live_bytes"):  # the operation fails: no model is loaded
            ada.create(0, rank=5)
        ada.create(1)
        with pytest.raises(InvalidInput, match=f"all runs of this server may take {run_bytes}"):
            ada.create(2, rank=5)
        assert ada.engine.stats().live_runs == 1


@pytest.mark.parametrize("why", ["finished", "silent"])
def test_the_runs_of_a_session_that_is_over_leave_memory(why: str, tiny_model: Path, tmp_path: Path) -> None:
    settings = {"maintenance_interval_s": 0.02, "session_silent_s": 0.0 if why == "silent" else 900.0}
    with running(tmp_path, tiny_model, **settings) as ada:
        runs = [ada.create(number) for number in range(3)]
        ada.run(forward_backward(runs[0], 1))
        if why == "finished":
            assert ada.engine.stats().live_runs == 3
            ada.engine.store.sessions.finish(ada.session, time.time(), "success", None)
        wait_for_stats(ada, lambda stats: stats.live_runs == 0)
        assert ada.run(optim_step(runs[0], 2))["metrics"], "it comes back while its session lasts"


def test_runs_that_programs_left_behind_do_not_count_against_their_user(
    tiny_model: Path, tmp_path: Path
) -> None:
    with running(tmp_path, tiny_model, max_live_runs_per_user=2) as ada:
        left = [ada.create(number) for number in range(2)]
        with pytest.raises(OverQuota, match="close sessions"):
            ada.create(2)
        ada.engine.store.sessions.finish(ada.session, time.time() - 1, "success", None)
        again = Caller(ada.engine, session="again")
        kept = [again.create(number) for number in range(2)]
        with pytest.raises(OverQuota, match="close sessions"):
            again.create(2)
        ada.engine.run_retention()
        rows = [ada.engine.store.runs.get(run) for run in (*left, *kept)]
        assert [row.status for row in rows if row] == [RunStatus.RELEASED] * 2 + [RunStatus.LIVE] * 2


def test_evictions_and_rejections_are_logged_once_a_minute(
    run_bytes: int, tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "tinkex.engine")
    with running(tmp_path, tiny_model, max_live_bytes=run_bytes, max_live_runs_per_user=4) as ada:
        for number in range(4):
            ada.create(number)
        for number in range(4, 8):
            with pytest.raises(OverQuota):
                ada.create(number)
    lines = [record.getMessage() for record in caplog.records]
    (evicted,) = [line for line in lines if "evicted" in line]
    assert "1 runs" in evicted
    assert str(run_bytes) in evicted
    (rejected,) = [line for line in lines if "429" in line]
    assert "of ada" in rejected
    assert "4 runs of yours" in rejected
