"""Clearing away on a disk that is full, and while nothing can be recorded."""

from __future__ import annotations

import logging
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest

from tests.unit.engine.durability.test_replay import running
from tests.unit.engine.test_engine import optim_step
from tinkex.engine.store.checkpoints import Checkpoints
from tinkex.engine.store.futures import Futures
from tinkex.types import SaveWeightsRequest


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

        def refused(self: Futures, **_: float) -> None:
            raise full()

        with monkeypatch.context() as trouble, caplog.at_level(logging.WARNING, "tinkex.engine"):
            trouble.setattr(Futures, "prune", refused)
            while "cannot be removed: database or disk is full" not in caplog.text:
                time.sleep(0.01)
            ada.run(optim_step(run, 1))
        assert "Traceback" not in caplog.text
