"""A full disk, a locked or corrupt database, missing weights: a clear error, and normal operation after repair."""

from __future__ import annotations

import contextlib
import json
import resource
import shutil
import sqlite3
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.durability.killable import MODEL, KillableServer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),  # servers start slowly on a busy machine
]

TOKENS = [5, 6, 7, 8, 9, 10]


class Client:
    """A client that returns every response."""

    def __init__(self, server: KillableServer) -> None:
        self.server = server
        self.session = self.post("create_session", {})["session_id"]
        self.run = f"{self.session}:train:0"
        self.number = 0

    def call(self, path: str, body: object = None, method: str | None = None) -> tuple[int, Any]:
        data = None if body is None else json.dumps(body).encode()
        headers = {"X-API-Key": self.server.key, "Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.server.url}{path}", data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=180) as response:
                return response.status, json.loads(response.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    def post(self, name: str, body: object) -> dict[str, Any]:
        status, answer = self.call(f"/api/v1/{name}", body)
        assert status == 200, answer
        assert isinstance(answer, dict)
        return answer

    def outcome(self, request_id: str) -> dict[str, Any]:
        deadline = time.monotonic() + 180
        while time.monotonic() < deadline:
            status, answer = self.call("/api/v1/retrieve_future", {"request_id": request_id})
            if status != 408:
                assert status == 200, answer
                assert isinstance(answer, dict)
                return answer
        raise AssertionError(f"{request_id} has no outcome")

    def create(self, rank: int = 2) -> None:
        lora = {"rank": rank, "seed": 1}
        body = {"session_id": self.session, "model_seq_id": 0, "base_model": MODEL, "lora_config": lora}
        assert self.outcome(self.post("create_model", body)["request_id"])["model_id"] == self.run

    def numbered(self, **body: Any) -> dict[str, Any]:
        self.number += 1
        return {"model_id": self.run, "seq_id": self.number, **body}

    def step(self) -> dict[str, Any]:
        return self.numbered(adam_params={"learning_rate": 1e-2})

    def train(self) -> float:
        """One pass and one step; returns the loss before the step."""
        target = {"data": TOKENS[1:], "dtype": "int64", "shape": [len(TOKENS) - 1]}
        chunk = {"type": "encoded_text", "tokens": TOKENS[:-1]}
        datum = {"model_input": {"chunks": [chunk]}, "loss_fn_inputs": {"target_tokens": target}}
        given = {"data": [datum], "loss_fn": "cross_entropy"}
        passed = self.post("forward_backward", self.numbered(forward_backward_input=given))
        stepped = self.post("optim_step", self.step())
        assert "metrics" in self.outcome(stepped["request_id"])
        return float(self.outcome(passed["request_id"])["metrics"]["loss:sum"])

    def save(self, name: str) -> dict[str, Any]:
        return self.outcome(self.post("save_weights", self.numbered(path=name))["request_id"])

    @property
    def health(self) -> str:
        return str(self.call("/api/v1/healthz")[1]["status"])


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KillableServer]:
    with KillableServer(tmp_path_factory.mktemp("stored"), tiny_model, "--long-poll-s", "5") as running:
        yield running


@pytest.fixture
def ada(server: KillableServer) -> Client:
    client = Client(server)
    client.create()
    return client


@contextmanager
def full_disk(server: KillableServer, room: int = 0) -> Iterator[None]:
    """No file of the server may grow beyond ``room``, as on a full disk."""
    processes = [server.process.pid, *(worker.pid for worker in server.workers())]
    before = {pid: resource.prlimit(pid, resource.RLIMIT_FSIZE) for pid in processes}
    for pid, (_, hard) in before.items():
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        for pid, limits in before.items():
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)


@contextmanager
def locked_database(server: KillableServer) -> Iterator[None]:
    """Another program locks the database, like a backup that never ends."""
    other = sqlite3.connect(server.home / "engine" / "engine.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        other.execute("ROLLBACK")
        other.close()


@pytest.mark.parametrize("trouble", [full_disk, locked_database])
def test_submissions_are_rejected_while_the_database_cannot_be_written(
    server: KillableServer, ada: Client, trouble: Any
) -> None:
    before = ada.train()
    step = ada.step()
    with trouble(server):
        for _ in range(2):
            status, answer = ada.call("/api/v1/optim_step", step)
            assert status == 503
            assert "nothing was changed" in answer["detail"]
        status, answer = ada.call("/api/v1/create_session", {})
        assert status == 503, answer
        assert "cannot be written" in answer["detail"]
        assert ada.health.startswith("degraded: "), ada.health
        assert ada.call(f"/api/v1/training_runs/{ada.run}")[0] == 200
    assert "metrics" in ada.outcome(ada.post("optim_step", step)["request_id"])
    assert ada.train() < before
    healthy(ada)


def gone(directory: Path) -> None:
    shutil.rmtree(directory)


def cut_short(directory: Path) -> None:
    file = directory / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def without_optimizer(directory: Path) -> None:
    (directory / "optimizer.safetensors").unlink()


@pytest.mark.parametrize("corrupt", [gone, cut_short, without_optimizer])
def test_a_checkpoint_with_missing_files_is_rejected_until_they_are_restored(
    server: KillableServer, ada: Client, tmp_path: Path, corrupt: Any
) -> None:
    ada.train()
    path = ada.save("kept")["path"]
    loss = ada.train()
    directory = server.home / "engine" / "checkpoints" / ada.run.replace(":", "~") / "weights" / "kept"
    shutil.copytree(directory, tmp_path / "backup")
    corrupt(directory)
    archive = f"/api/v1/training_runs/{ada.run}/checkpoints/weights/kept/archive"
    sampling = {"session_id": ada.session, "sampling_session_seq_id": 0, "model_path": path}
    copying = {"source_path": path, "destination_project_id": "p"}
    for status, answer in (
        ada.call("/api/v1/load_weights", ada.numbered(path=path, optimizer=True)),
        ada.call(archive),
        ada.call("/api/v1/create_sampling_session", sampling),
        ada.call("/api/v1/copy_weights", copying),
    ):
        assert status == 410, answer
        assert path in answer["detail"]
        assert "cannot be read" in answer["detail"]
    assert ada.health.startswith("degraded: files of checkpoints are missing")
    assert path not in ada.health  # health needs no key
    assert path in server.log
    assert ada.train() < loss  # the run is unchanged and continues
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(tmp_path / "backup", directory)
    healthy(ada)
    loaded = ada.post("load_weights", ada.numbered(path=path, optimizer=True))
    assert ada.outcome(loaded["request_id"])["path"] == path
    assert ada.train() == loss


def healthy(client: Client) -> None:
    """Wait until health is ok; it rechecks periodically."""
    deadline = time.monotonic() + 180
    while client.health != "ok":
        assert time.monotonic() < deadline, client.health
        time.sleep(0.05)


def test_a_save_that_does_not_fit_fails_alone_and_leaves_no_file(server: KillableServer) -> None:
    ada = Client(server)
    ada.create(rank=512)
    loss = ada.train()
    assert ada.save("first")["path"].endswith("first")
    data = server.home / "engine"
    folder = data / "checkpoints" / ada.run.replace(":", "~") / "weights"
    room = max(file.stat().st_size for file in data.glob("engine.db*")) + 4_000_000
    assert max(file.stat().st_size for file in folder.glob("*/*")) > room
    with full_disk(server, room):
        failed = ada.save("second")
        assert failed["category"] == "server"
        assert "disk" in failed["error"]
        assert [entry.name for entry in folder.iterdir()] == ["first"]
        assert ada.train() < loss
    assert ada.save("second")["path"].endswith("second")
    healthy(ada)


def test_a_corrupt_database_is_rejected_and_not_changed(tiny_model: Path, tmp_path: Path) -> None:
    server = KillableServer(tmp_path, tiny_model, "--long-poll-s", "5")
    with server:
        client = Client(server)
        client.create()
        loss = client.train()
        server.stop()
    database = server.home / "engine" / "engine.db"
    sound = database.read_bytes()
    for start, stop in ((0, 100), place_of(database, "runs")):
        corrupted = sound[:start] + b"\xff" * (stop - start) + sound[stop:]
        database.write_bytes(corrupted)
        server.start()
        assert server.process.wait(180) == 1
        log_line = server.log.splitlines()[-1]
        assert "cannot be opened" in log_line or "is corrupt" in log_line
        assert "backup" in log_line
        assert database.read_bytes() == corrupted
        database.write_bytes(sound)
    with server:
        # The same while it runs, in a page that has not been read yet.
        start, stop = place_of(database, "usage")
        with database.open("r+b") as file:
            file.seek(start)
            file.write(b"\xff" * (stop - start))
        query = "starting_on=2026-01-01T00:00:00Z&ending_before=2026-01-02T00:00:00Z"
        status, answer = client.call(f"/api/v1/billing/usage/events?{query}")
        assert status == 503
        assert "backup" in answer["detail"]
        assert "corrupt" in client.health
    for left in database.parent.glob("engine.db-*"):
        left.unlink()
    database.write_bytes(sound)
    with server:
        healthy(client)
        assert client.train() < loss
        assert "Traceback" not in server.log


def place_of(database: Path, table: str) -> tuple[int, int]:
    """The offset and size of a table's first page."""
    with contextlib.closing(sqlite3.connect(database)) as connection:
        [[page]] = connection.execute(
            "SELECT rootpage FROM sqlite_master WHERE name = ?", (table,)
        ).fetchall()
        [[size]] = connection.execute("PRAGMA page_size").fetchall()
    return (page - 1) * size, page * size


@pytest.mark.parametrize("trouble", [full_disk, locked_database])
def test_a_server_shuts_down_cleanly_with_a_broken_disk(
    tiny_model: Path, tmp_path: Path, trouble: Any
) -> None:
    with KillableServer(tmp_path, tiny_model) as server:
        client = Client(server)
        client.create()
        client.train()  # results were fetched, which is recorded at shutdown
        with trouble(server):
            server.stop()
        assert "Traceback" not in server.log
        assert "fault" not in server.log


def test_a_server_that_cannot_write_fails_at_the_start_and_changes_nothing(
    tiny_model: Path, tmp_path: Path
) -> None:
    server = KillableServer(tmp_path, tiny_model)
    with server:
        client = Client(server)
        client.create()
        loss = client.train()
        server.kill()
    with locked_database(server):
        server.start()
        assert server.process.wait(180) == 1
        log_line = server.log.splitlines()[-1]
        assert "Free disk space, or close the program that locks engine.db" in log_line, server.log
        assert "fault" not in server.log
    with server:
        assert client.train() < loss
