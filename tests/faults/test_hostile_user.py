"""One user abuses a server in every known way, and another one trains beside it: what the first does, the second hardly sees.

The same program runs on a second server of its own at the same time, which is what the times are compared with.
``TINKEX_STRESS_SECONDS`` sets how long they run beside each other.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import tinkex
from tests.faults.hostile_user import BEHAVIOURS, MODEL, Server, costly_loss, datums
from tests.servers import ServedEngine, serve
from tinkex import types

SECONDS = float(os.environ.get("TINKEX_STRESS_SECONDS", "120"))
MIB = 2**20

MAX_RATIO = 5
"""How much longer an operation of the polite user may take at the 99th percentile than on a server of its own, plus one turn."""
MAX_GROWTH_BYTES = 768 * MIB
"""The memory that server and worker may take for what the hostile user sends: the sum of the budgets below, and the largest pass."""
MAX_DISK_BYTES = 200 * MIB
OPTIONS = (
    *("--max-body-bytes", "16M", "--kv-cache-bytes", "64M", "--max-pending-operations", "200"),
    *("--max-live-runs", "40", "--max-live-runs-per-user", "12", "--snapshots-in-memory", "4"),
    *("--max-disk-bytes-per-user", str(50 * MIB), "--max-disk-bytes", str(MAX_DISK_BYTES)),
    *("--max-pending-bytes-per-user", "16M", "--max-pending-bytes-in-memory", "8M"),
    *("--gap-timeout-s", "20s", "--request-stall-s", "5s", "--maintenance-interval-s", "2s"),
    *("--session-silent-s", "20s", "--max-connections-per-address", "200", "--threads", "1"),
)


@dataclass
class Polite:
    """A user who trains and samples, one operation after the other."""

    training: tinkex.TrainingClient
    sampling: tinkex.SamplingClient
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def step(self) -> None:
        """Two training operations and a sample, each timed."""
        output = self._timed(lambda: self.training.forward_backward(datums(4, 16), "cross_entropy"))
        self.losses.append(output.metrics["loss:sum"])
        self._timed(lambda: self.training.optim_step(types.AdamParams(learning_rate=1e-3)))
        params = types.SamplingParams(max_tokens=8, stop=[], seed=1)
        sampled = self._timed(lambda: self.sampling.sample(types.ModelInput.from_ints([5, 6, 7]), 1, params))
        assert len(sampled.sequences[0].tokens) == 8

    def _timed(self, submit: Callable[[], Any]) -> Any:
        started = time.monotonic()
        result = submit().result(timeout=120)
        self.seconds.append(time.monotonic() - started)
        return result

    def p99(self) -> float:
        """The 99th percentile of the operations so far, which are forgotten."""
        seconds, self.seconds = self.seconds, []
        return float(np.quantile(seconds, 0.99))


class Usage:
    """The peak of a server's memory, of all its processes, and of its files."""

    def __init__(self, pid: int, directory: Path) -> None:
        self._server = psutil.Process(pid)
        self._directory = directory
        self.memory = self.disk = 0

    def measure(self) -> None:
        memory = 0
        for process in (self._server, *self._server.children(recursive=True)):
            try:
                memory += process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        self.memory = max(self.memory, memory)
        # os.walk skips directories that are deleted meanwhile.
        files = (Path(parent, name) for parent, _, names in os.walk(self._directory) for name in names)
        self.disk = max(self.disk, sum(map(size_of, files)))


def size_of(file: Path) -> int:
    """The size of a file, which may be gone."""
    try:
        return file.stat().st_size if file.is_file() else 0
    except OSError:
        return 0


@contextmanager
def measured(usage: Usage) -> Iterator[None]:
    """Measures several times a second during the block."""
    stop = threading.Event()

    def measure() -> None:
        while not stop.wait(0.2):
            usage.measure()

    thread = threading.Thread(target=measure)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def new_key(home: Path, user: str) -> str:
    command = [
        sys.executable,
        "-m",
        "tinkex",
        "keys",
        "create",
        user,
        "--data-dir",
        str(home / "engine"),
        "-q",
    ]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def longest_turn(server: ServedEngine, key: str) -> float:
    """How long the costliest pass of the hostile user takes, alone."""
    user = Server(server.url, key)
    made = user.run()
    assert made is not None
    loss_id = user.upload(made[0], costly_loss())
    assert loss_id is not None
    taken = []
    for seq_id in (1, 2, 3):
        started = time.monotonic()
        submitted = user.send_pass(made[1], seq_id, datums(100, 1), loss_id)
        while user.post("retrieve_future", {"request_id": submitted["request_id"]}) is None and is_pending(
            user
        ):
            user.statuses.clear()
        taken.append(time.monotonic() - started)
    return max(taken)


def is_pending(user: Server) -> bool:
    """Whether the last poll ended without an outcome."""
    return bool(user.statuses["408"])


@contextmanager
def hostile(
    server: ServedEngine, key: str, seconds: float, found: dict[str, Any]
) -> Iterator[subprocess.Popen[str]]:
    """The hostile user's program, for so many seconds; ``found`` has its statuses after the block."""
    command = [sys.executable, "-m", "tests.faults.hostile_user", server.url, key, str(seconds), *BEHAVIOURS]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process
        printed, _ = process.communicate(timeout=180)
        found |= json.loads(printed)
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 400)
def test_a_hostile_user_slows_another_one_by_a_bounded_factor_and_stays_within_the_budgets(
    tiny_model: Path, tmp_path: Path
) -> None:
    found: dict[str, Any] = {}
    with (
        served(tmp_path / "alone", tiny_model) as (_, alone),
        served(tmp_path, tiny_model) as (server, beside),
    ):
        usage = Usage(server.pid, tmp_path / "engine")
        hostile_key = new_key(tmp_path, "hostile")
        turn = longest_turn(server, hostile_key)
        for polite in (alone, beside):
            for _ in range(3):
                polite.step()
            polite.p99()
        usage.measure()
        before = usage.memory
        with measured(usage), hostile(server, hostile_key, SECONDS, found) as program:
            while program.poll() is None:  # in turns, so that whatever else uses this machine slows both
                alone.step()
                beside.step()
        beside.training.save_state("kept").result(timeout=120)
    lone_p99, p99 = alone.p99(), beside.p99()
    summary = (
        f"alone {lone_p99:.3f} s, turn {turn:.3f} s, beside {p99:.3f} s, {len(beside.losses)} steps; {found}"
    )
    assert beside.losses == alone.losses, "no operation of the polite user is lost or changed"
    assert beside.losses[-1] < beside.losses[0]
    assert p99 <= MAX_RATIO * lone_p99 + turn, summary
    assert usage.memory - before <= MAX_GROWTH_BYTES, f"{usage.memory - before} bytes; {summary}"
    assert usage.disk <= MAX_DISK_BYTES, f"{usage.disk} bytes; {summary}"
    assert found.keys() == BEHAVIOURS.keys()
    assert not any("500" in statuses for statuses in found.values()), summary


@contextmanager
def served(home: Path, model: Path) -> Iterator[tuple[ServedEngine, Polite]]:
    """A server, and a polite user of it."""
    home.mkdir(exist_ok=True)
    with (
        serve(home, "--model", f"{MODEL}={model}", *OPTIONS) as server,
        tinkex.ServiceClient(base_url=server.url, api_key=new_key(home, "polite")) as service,
    ):
        training = service.create_lora_training_client(MODEL, rank=4, seed=1)
        yield server, Polite(training, service.create_sampling_client(base_model=MODEL))
