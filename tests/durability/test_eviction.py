"""A server whose runs do not fit in memory is killed while it evicts them: nothing is lost."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

import tinkex
from tests.durability.killable import MODEL, KillableServer
from tests.durability.test_kill import datum
from tinkex import types

pytestmark = pytest.mark.slow

NUM_RUNS = 3
PATIENCE_S = 120
NUM_KILLS = 2
ONE_RUN = "1"
"""All but the run that is used are on disk."""


def train_in_turns(server: KillableServer) -> list[Any]:
    """Trains runs in turns, each with a gradient that waits for its step while the others train; returns all results."""
    with tinkex.ServiceClient(base_url=server.url, api_key=server.key) as service:
        runs = [service.create_lora_training_client(MODEL, rank=4, seed=seed) for seed in range(NUM_RUNS)]
        results: list[Any] = []
        for n in range(8):
            for run in runs:
                output = run.forward_backward([datum(n)], "cross_entropy").result(timeout=PATIENCE_S)
                results.append(output.loss_fn_outputs[0]["logprobs"].to_numpy().tobytes())
            for run in runs:
                step = run.optim_step(types.AdamParams(learning_rate=1e-2)).result(timeout=PATIENCE_S)
                results.append(step.metrics)
        return results


class Killer(threading.Thread):
    """Kills a server, or only its worker, while a savepoint is being written, again and again."""

    def __init__(self, server: KillableServer, *, only_worker: bool) -> None:
        super().__init__()
        self._server = server
        self._only_worker = only_worker
        self.stopped = threading.Event()
        self.num_kills = 0

    def run(self) -> None:
        folder = self._server.home / "engine" / "savepoints"
        known: set[Path] = set()
        while not self.stopped.is_set() and self.num_kills < NUM_KILLS:
            found = set(folder.iterdir()) if folder.exists() else set()
            is_new, known = bool(found - known), found
            if not is_new:
                time.sleep(0.0005)
            elif self._only_worker:
                self.num_kills += bool(self._server.kill_workers())
            else:
                self._server.restart()
                self._server.wait()
                self.num_kills += 1


@pytest.mark.parametrize("only_worker", [False, True], ids=["server", "worker"])
def test_a_kill_while_runs_are_evicted_loses_nothing(
    only_worker: bool, tiny_model: Path, tmp_path: Path
) -> None:
    homes = [tmp_path / name for name in ("room", "tight")]
    for home in homes:
        home.mkdir()
    with KillableServer(homes[0], tiny_model) as server:
        expected = train_in_turns(server)
    with KillableServer(homes[1], tiny_model, "--max-live-runs", ONE_RUN) as server:
        killer = Killer(server, only_worker=only_worker)
        killer.start()
        try:
            assert train_in_turns(server) == expected
        finally:
            killer.stopped.set()
            killer.join()
        assert killer.num_kills
        assert "other digits" not in server.log
        assert "evicted" in server.log
