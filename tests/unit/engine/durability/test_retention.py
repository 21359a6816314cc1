"""Clearing away on a disk that is full, and while nothing can be recorded."""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.engine.api.test_custom_losses import definition
from tests.unit.engine.durability.test_replay import running
from tests.unit.engine.test_engine import Caller, forward_backward, optim_step, sample
from tinkex.engine.store.checkpoints import Checkpoints
from tinkex.engine.store.futures import Futures
from tinkex.errors import Expired, InvalidInput
from tinkex.types import CreateCustomLossRequest, SaveWeightsForSamplerRequest, SaveWeightsRequest
from tinkex.types.plain import from_plain


def full() -> sqlite3.OperationalError:
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorname = "SQLITE_FULL"
    return error


@pytest.mark.slow
def test_on_a_full_disk_the_files_of_a_checkpoint_go_before_its_record(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path, tiny_model) as ada:
        run, store = ada.create(), ada.engine.store
        for number, (name, ttl) in enumerate((("unwanted", None), ("expired", 1)), 1):
            ada.run(SaveWeightsRequest(model_id=run, seq_id=number, path=name, ttl_seconds=ttl))
        places = {
            row.name: store.directories.resolve(row.directory) for row in store.checkpoints.of_run(run, 0.0)
        }
        delete = Checkpoints.delete

        def without_room(self: Checkpoints, row: Any) -> None:
            if places[row.name].exists():
                raise full()
            delete(self, row)

        monkeypatch.setattr(Checkpoints, "delete", without_room)
        row = store.checkpoints.get(run, "weights", "unwanted")
        assert row is not None
        ada.engine.delete_checkpoint(row)
        while store.checkpoints.get(run, "weights", "expired") is not None:
            if time.time() > row.created_at + 1:
                ada.engine.run_retention()
            time.sleep(0.05)
        assert not any(place.exists() for place in places.values())


def test_a_round_that_cannot_be_recorded_is_done_later(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with running(tmp_path, tiny_model, maintenance_interval_s=0.01) as ada:
        run = ada.create()

        def rejected(self: Futures, **_: float) -> None:
            raise full()

        with monkeypatch.context() as trouble, caplog.at_level(logging.WARNING, "tinkex.engine"):
            trouble.setattr(Futures, "prune", rejected)
            while "cannot be removed: database or disk is full" not in caplog.text:
                time.sleep(0.01)
            ada.run(optim_step(run, 1))
        assert "Traceback" not in caplog.text


@pytest.mark.slow
def test_other_writers_get_in_while_many_old_results_are_deleted(tiny_model: Path, tmp_path: Path) -> None:
    with running(tmp_path, tiny_model, maintenance_interval_s=0.05) as ada:
        store, num_results = ada.engine.store, 20_000
        with store.database.transaction() as execute:
            execute.many(
                "INSERT INTO futures (request_id, owner, kind, target, seq_id, payload_hash, status, created_at, finished_at, "
                "result) VALUES (?, 'ada', 'sample', 'old', ?, x'00', 'done', 1.0, 1.0, zeroblob(1000))",
                [(f"old-{number}", number) for number in range(num_results)],
            )
        seen: list[int] = []
        while not seen or seen[-1] > 0:
            with store.database.transaction() as execute:
                execute("INSERT INTO users VALUES (?, 0.0)", (f"user-{len(seen)}",))
                rows = store.database.all(
                    "SELECT count(*) AS num FROM futures WHERE status = 'done' AND target = 'old'"
                )
            seen.append(rows[0]["num"])
        between = {count for count in seen if 0 < count < num_results}
        assert len(between) > 3, "the deletion was seen half done, by one who wrote in between"
        assert ada.create(), "and operations get their turn"


def rounds_until(ada: Caller, done: Callable[[], bool]) -> None:
    """Runs retention until a condition holds."""
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline
        ada.engine.run_retention()


@pytest.mark.slow
def test_unused_snapshots_of_a_run_are_deleted_except_the_newest(tiny_model: Path, tmp_path: Path) -> None:
    with running(tmp_path, tiny_model, newest_snapshots_kept=2, snapshot_idle_s=0.01) as ada:
        run, store = ada.create(), ada.engine.store
        samplers = []
        for number in range(5):
            ada.run(optim_step(run, 2 * number + 1))
            save = SaveWeightsForSamplerRequest(
                model_id=run, seq_id=2 * number + 2, sampling_session_seq_id=number
            )
            samplers.append(ada.run(save)["sampling_session_id"])
        folder = store.root / "snapshots"
        rounds_until(ada, lambda: len(list(folder.iterdir())) <= 2)
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        assert size < store.disk_usage.of(ada.owner)["snapshots"] < size + 1000
        with pytest.raises(Expired, match="newer ones of its run exist"):
            ada.submit(sample(samplers[0]))
        assert ada.logprobs(samplers[-1])
        assert ada.logprobs(samplers[-2])
        again = SaveWeightsForSamplerRequest(model_id=run, seq_id=11, sampling_session_seq_id=5)
        assert ada.logprobs(ada.run(again)["sampling_session_id"]) == ada.logprobs(samplers[-1])


@pytest.mark.slow
def test_a_sampler_of_inflight_weights_survives_restarts_and_keeps_only_the_newest(
    tiny_model: Path, tmp_path: Path
) -> None:
    with running(tmp_path, tiny_model) as ada:
        run, store = ada.create(), ada.engine.store
        samplers = []
        for number in range(3):
            ada.run(forward_backward(run, 3 * number + 1))
            ada.run(optim_step(run, 3 * number + 2))
            save = SaveWeightsForSamplerRequest(
                model_id=run, seq_id=3 * number + 3, sampling_session_seq_id=number, kind="inflight"
            )
            samplers.append(ada.run(save)["sampling_session_id"])
        found = ada.logprobs(samplers[0])
        assert found == ada.logprobs(samplers[2])
        folder = store.root / "snapshots"
        rounds_until(ada, lambda: len(list(folder.iterdir())) == 1)
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        assert size <= store.disk_usage.of(ada.owner)["snapshots"] < size + 1000
        other = ada.create(1)
        save = SaveWeightsForSamplerRequest(
            model_id=other, seq_id=1, sampling_session_seq_id=3, kind="inflight"
        )
        assert ada.logprobs(ada.run(save)["sampling_session_id"]) != found
        assert ada.logprobs(samplers[1]) == found, "the runs do not share them"
    with running(tmp_path, tiny_model) as ada:
        assert [ada.logprobs(each) for each in samplers] == [found] * 3
        ada.run(forward_backward(run, 10))
        ada.run(optim_step(run, 11))
        save = SaveWeightsForSamplerRequest(
            model_id=run, seq_id=12, sampling_session_seq_id=4, kind="inflight"
        )
        newest = ada.run(save)["sampling_session_id"]
        assert ada.logprobs(samplers[0]) == ada.logprobs(newest) != found


def test_inflight_weights_have_no_name_and_no_ttl(tiny_model: Path, tmp_path: Path) -> None:
    with running(tmp_path, tiny_model) as ada:
        run = ada.create()
        save = SaveWeightsForSamplerRequest(model_id=run, seq_id=1, kind="inflight")
        for change, message in (
            ({"path": "named"}, r"no name \(path\)"),
            ({"sampling_session_seq_id": 0, "ttl_seconds": 3600}, "ttl_seconds needs a named save"),
            ({}, "needs a name"),
        ):
            with pytest.raises(InvalidInput, match=message):
                ada.submit(save.model_copy(update=change))


def test_what_is_left_of_an_old_session_is_deleted_and_checkpoints_stay(
    tiny_model: Path, tmp_path: Path
) -> None:
    settings = {"session_retention_s": 0.01, "session_idle_s": 0.01, "session_grace_s": 0.01}
    with running(tmp_path, tiny_model, **settings) as ada:
        store = ada.engine.store
        kept, dropped = ada.create(0), ada.create(1)
        sampler = ada.sampler(base_model="tiny")
        ada.engine.submit(
            ada.owner,
            from_plain(definition("s"), CreateCustomLossRequest),
        )
        ada.run(SaveWeightsRequest(model_id=kept, seq_id=1, path="kept"))
        rounds_until(ada, lambda: store.runs.get(dropped) is None)
        rounds_until(ada, lambda: store.samplers.get(sampler) is None)
        assert store.losses.get("s:loss:0") is None
        assert store.runs.get(kept) is not None, "it has a checkpoint"
        row = store.checkpoints.get(kept, "weights", "kept")
        assert row is not None
        ada.engine.delete_checkpoint(row)
        rounds_until(ada, lambda: store.sessions.get("s") is None)
        assert store.disk_usage.of(ada.owner).get("sessions", 0) == 0
