from __future__ import annotations

import hashlib
import math
import os
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from tinkex.engine.store import (
    HOUR_S,
    AuditRow,
    CheckpointKind,
    CheckpointRow,
    FutureRow,
    FutureStatus,
    Outcome,
    ResultFormat,
    RunRow,
    RunStatus,
    SamplerRow,
    SessionRow,
    Store,
    Timing,
    UsageKey,
    UsageKind,
    check_name,
    open_users,
)
from tinkex.engine.store.database import BUSY_TIMEOUT_MS, CONTENDED_BUSY_TIMEOUT_MS, Database
from tinkex.engine.store.directories import Directories
from tinkex.engine.store.flushing import flush_path
from tinkex.engine.store.migrations import MIGRATIONS
from tinkex.engine.store.users import Users
from tinkex.errors import InvalidInput, SetupError
from tinkex.types import LoraConfig

LORA = LoraConfig(rank=8, seed=3, train_unembed=False)


def session(session_id: str = "s", **changes: object) -> SessionRow:
    values = {"owner": "ada", "created_at": 1.0, "seen_at": 1.0, "tags": ("t",), "user_metadata": {"k": [1]}}
    return SessionRow(session_id=session_id, **{**values, **changes})  # type: ignore[arg-type]


def run(run_id: str = "s:train:0", **changes: object) -> RunRow:
    values = {
        "session_id": "s",
        "owner": "ada",
        "base_model": "base",
        "created_at": 1.0,
        "used_at": 1.0,
        "status": RunStatus.LIVE,
        "lora": LORA,
    }
    return RunRow(run_id=run_id, **{**values, **changes})  # type: ignore[arg-type]


def future(request_id: str, target: str = "s:train:0", seq_id: int | None = 1) -> FutureRow:
    return FutureRow(request_id, "ada", "optim_step", target, seq_id, b"hash", 1.0, request=b"{}")


def checkpoint(name: str, **changes: object) -> CheckpointRow:
    values = {
        "run_id": "s:train:0",
        "kind": CheckpointKind.WEIGHTS,
        "owner": "ada",
        "base_model": "base",
        "lora": LORA,
        "has_optimizer": True,
        "created_at": 1.0,
        "size_bytes": 10,
        "directory": f"checkpoints/{name}",
    }
    return CheckpointRow(name=name, **{**values, **changes})  # type: ignore[arg-type]


@pytest.fixture
def store(tmp_path: Path):
    with Store(tmp_path / "engine") as opened:
        yield opened


def test_everything_survives_closing_and_opening_again(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.sessions.add(session(project_id="p", display_name="d", sdk_version="0.36.0"))
        store.runs.add(run(optimizer_config={"type": "adamw"}, user_metadata={"a": "b"}))
        store.futures.accept(future("r1"))
        store.checkpoints.put(checkpoint("c", user_metadata={"x": 1}, expires_at=99.0))
        store.samplers.add(SamplerRow("s:sample:0", "s", "ada", "base", 1.0, directory="snapshots/1"))
    with Store(tmp_path) as store:
        assert store.sessions.get("s") == session(project_id="p", display_name="d", sdk_version="0.36.0")
        assert store.runs.get("s:train:0") == run(
            optimizer_config={"type": "adamw"}, user_metadata={"a": "b"}
        )
        assert [store.futures.request(f.request_id) for f in store.futures.pending()] == [b"{}"]
        assert store.checkpoints.get("s:train:0", "weights", "c") == checkpoint(
            "c", user_metadata={"x": 1}, expires_at=99.0
        )
        assert store.samplers.get("s:sample:0") == SamplerRow(
            "s:sample:0", "s", "ada", "base", 1.0, directory="snapshots/1"
        )


def test_unknown_rows_are_none(store: Store) -> None:
    assert store.sessions.get("x") is None
    assert store.runs.get("x") is None
    assert store.futures.get("x") is None
    assert store.futures.outcome("x") is None
    assert store.checkpoints.get("x", "weights", "y") is None
    assert store.samplers.get("x") is None


def test_the_key_is_created_once_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        key = store.local_key(now=0.0)
        assert key.startswith("tml-")
        assert store.users.find(key) == "local"
        assert store.users.find(key + "x") is None
        assert key.encode() not in b"".join(p.read_bytes() for p in tmp_path.glob("engine.db*"))
    assert stat.S_IMODE((tmp_path / "api_key").stat().st_mode) == 0o600
    with Store(tmp_path) as store:
        assert store.local_key(now=1.0) == key


def test_a_key_identifies_its_user(store: Store) -> None:
    store.users.add_key("ada", "tml-a", 0.0)
    assert store.users.find("tml-a") == "ada"
    assert store.users.find("tml-b") is None
    store.users.add_key("bob", "tml-b", 0.0)
    assert store.users.find("tml-b") == "bob"


def test_two_engines_cannot_share_a_data_directory(store: Store) -> None:
    with pytest.raises(SetupError, match=rf"process {os.getpid()}.*--data-dir"):
        Store(store.root)


@pytest.mark.slow
def test_the_lock_of_a_dead_process_does_not_block(tmp_path: Path) -> None:
    script = (
        "import os, pathlib, sys; from tinkex.engine.store.lock import DirectoryLock;"
        "lock = DirectoryLock(pathlib.Path(sys.argv[1])); os._exit(9)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    assert done.returncode == 9
    assert (tmp_path / "engine.lock").read_text().strip().isdigit()
    Store(tmp_path).close()


def test_a_data_directory_that_cannot_be_written_is_a_setup_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SetupError, match="--data-dir"):
        Store(tmp_path / "file" / "engine")


def test_a_directory_with_other_files_is_not_taken_over(tmp_path: Path) -> None:
    thesis = tmp_path / "checkpoints" / "my" / "own" / "thesis"
    thesis.mkdir(parents=True)
    with pytest.raises(SetupError, match="contains other files"):
        Store(tmp_path)
    assert thesis.is_dir()


def test_data_of_a_newer_version_is_rejected(tmp_path: Path) -> None:
    Store(tmp_path).close()
    connection = sqlite3.connect(tmp_path / "engine.db")
    connection.execute("PRAGMA user_version = 999")
    connection.close()
    with pytest.raises(SetupError, match="newer version"):
        Store(tmp_path)


def test_an_operation_ends_once(store: Store) -> None:
    store.futures.accept(future("r1"))
    assert store.futures.outcome("r1") is None
    store.futures.finish([("r1", Outcome.done(b"one", ResultFormat.PROTO))], now=2.0)
    store.futures.finish([("r1", Outcome.failed("late", "server"))], now=3.0)
    assert store.futures.outcome("r1") == Outcome.done(b"one", ResultFormat.PROTO)
    assert store.futures.pending() == []


def test_an_operation_is_found_by_its_seq_id(store: Store) -> None:
    store.futures.accept(future("r1", seq_id=7))
    found = store.futures.find_by_seq_id("s:train:0", 7)
    assert found is not None
    assert found.request_id == "r1"
    assert store.futures.find_by_seq_id("s:train:0", 8) is None
    with pytest.raises(sqlite3.IntegrityError):
        store.futures.accept(future("r2", seq_id=7))


def test_operations_without_a_seq_id_do_not_conflict(store: Store) -> None:
    store.futures.accept(future("r1", seq_id=None))
    store.futures.accept(future("r2", seq_id=None))
    assert [f.request_id for f in store.futures.pending()] == ["r1", "r2"]


def test_results_expire_by_retention_and_pending_ones_never(store: Store) -> None:
    for number, name in enumerate(["fetched", "unfetched", "pending"]):
        store.futures.accept(future(name, seq_id=number))
    outcome = Outcome.done(b"x", ResultFormat.JSON)
    store.futures.finish([("fetched", outcome), ("unfetched", outcome)], now=10.0)
    store.futures.mark_fetched(["fetched"], now=11.0)
    assert store.futures.prune(fetched_before=12.0, finished_before=5.0, expired_before=0.0) == 1
    statuses = {
        name: row.status for name in ("fetched", "unfetched", "pending") if (row := store.futures.get(name))
    }
    assert statuses == {
        "fetched": FutureStatus.EXPIRED,
        "unfetched": FutureStatus.DONE,
        "pending": FutureStatus.PENDING,
    }
    while store.futures.prune(fetched_before=0.0, finished_before=100.0, expired_before=100.0):
        pass
    assert store.futures.get("fetched") is None
    assert store.futures.get("pending") is not None


def test_a_failed_transaction_leaves_nothing(store: Store) -> None:
    def fail() -> None:
        with store.database.transaction() as execute:
            execute("INSERT INTO users VALUES ('ghost', 0)")
            with store.database.transaction() as inner:
                inner("INSERT INTO users VALUES ('ghost2', 0)")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert store.database.all("SELECT * FROM users") == []


def test_threads_write_concurrently(store: Store) -> None:
    def write(thread: int) -> None:
        for number in range(25):
            store.futures.accept(future(f"{thread}-{number}", target=str(thread), seq_id=number))

    threads = [threading.Thread(target=write, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(store.futures.pending()) == 100


@pytest.mark.slow
def test_a_committed_operation_survives_a_crash_of_the_process(tmp_path: Path) -> None:
    script = (
        "import os, pathlib, sys; from tinkex.engine.store import Store, FutureRow;"
        "Store(pathlib.Path(sys.argv[1])).futures.accept(FutureRow('r1', 'ada', 'k', 't', 1, b'', 1.0, request=b'{}'));"
        "os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    with Store(tmp_path) as store:
        assert [f.request_id for f in store.futures.pending()] == ["r1"]


def test_migrations_are_applied_once(tmp_path: Path) -> None:
    for _ in range(2):
        database = Database(tmp_path / "engine.db")
        assert database.one("PRAGMA journal_mode")[0] == "wal"  # type: ignore[index]
        database.close()


def test_listings_belong_to_their_owner_newest_first(store: Store) -> None:
    for number in range(3):
        store.sessions.add(session(f"s{number}", created_at=float(number)))
        store.runs.add(run(f"s{number}:train:0", session_id=f"s{number}", used_at=float(number)))
        store.checkpoints.put(checkpoint(f"c{number}", created_at=float(number)))
    assert store.sessions.list_ids("ada", 2, 0) == ["s2", "s1"]
    assert store.sessions.list_ids("ada", 2, 2) == ["s0"]
    assert store.sessions.list_ids("bob", 10, 0) == []
    (newest,) = store.sessions.list_after("ada", 1, (math.inf, ""))
    assert newest.session_id == "s2"
    older = store.sessions.list_after("ada", 10, (newest.created_at, newest.session_id))
    assert [row.session_id for row in older] == ["s1", "s0"]
    assert [r.run_id for r in store.runs.list("ada", 1, 1)] == ["s1:train:0"]
    assert store.runs.count("ada") == 3
    assert store.runs.count("bob") == 0
    assert [c.name for c in store.checkpoints.of_owner("ada", 5.0, 10, 0)] == ["c2", "c1", "c0"]
    assert [c.name for c in store.checkpoints.of_run("s:train:0", 5.0)] == ["c0", "c1", "c2"]
    assert store.checkpoints.count("ada", 5.0) == 3


def test_expired_checkpoints_are_not_listed(store: Store) -> None:
    store.checkpoints.put(checkpoint("old", created_at=2.0, expires_at=10.0))
    store.checkpoints.put(checkpoint("new", created_at=1.0))
    assert [c.name for c in store.checkpoints.of_run("s:train:0", 10.0)] == ["new"]
    last = store.checkpoints.last("s:train:0", "weights", 9.0)
    assert last is not None
    assert last.path == "tinker://s:train:0/weights/old"
    assert [c.name for c in store.checkpoints.expired(10.0)] == ["old"]
    store.checkpoints.set_expiry(checkpoint("old"), None)
    assert store.checkpoints.expired(10.0) == []
    store.checkpoints.set_public(checkpoint("old"), public=True)
    store.checkpoints.delete(checkpoint("new"))
    assert [(c.name, c.public) for c in store.checkpoints.of_run("s:train:0", 10.0)] == [("old", True)]


def test_replacing_a_checkpoint_returns_the_old_directory(store: Store) -> None:
    assert store.checkpoints.put(checkpoint("c", directory="one")) is None
    assert store.checkpoints.put(checkpoint("c", directory="two")) == "one"
    assert store.checkpoints.directories() == ["two"]


def test_a_session_keeps_its_first_finish_reason(store: Store) -> None:
    store.sessions.add(session())
    assert store.sessions.finish("s", 5.0, "success", None)
    assert not store.sessions.finish("s", 6.0, "errored", "late")
    found = store.sessions.get("s")
    assert found is not None
    assert (found.finished_at, found.finish_reason, found.finish_detail) == (5.0, "success", None)


def test_inactive_and_finished_sessions_expire_while_they_hold_resources(store: Store) -> None:
    for name, seen in (("silent", 1.0), ("lively", 50.0), ("finished", 50.0), ("empty", 1.0)):
        store.sessions.add(session(name, seen_at=seen))
        if name != "empty":
            store.runs.add(run(f"{name}:train:0", session_id=name))
    store.sessions.finish("finished", 20.0, "success", None)
    assert set(store.sessions.expired(finished_before=30.0, seen_before=10.0)) == {"silent", "finished"}
    store.sessions.record_heartbeat("silent", 60.0)
    store.runs.set_status("finished:train:0", RunStatus.RELEASED)
    assert store.sessions.expired(finished_before=30.0, seen_before=10.0) == []


def test_releasing_a_session_returns_the_snapshots_no_other_session_uses(store: Store) -> None:
    for name in ("s", "other"):
        store.sessions.add(session(name))
    store.samplers.add(SamplerRow("s:sample:0", "s", "ada", "base", 1.0, directory="snapshots/own"))
    store.samplers.add(SamplerRow("s:sample:1", "s", "ada", "base", 1.0, directory="snapshots/shared"))
    store.samplers.add(
        SamplerRow("s:sample:2", "s", "ada", "base", 1.0, model_path="tinker://x", directory="named")
    )
    store.samplers.add(
        SamplerRow("other:sample:0", "other", "ada", "base", 1.0, directory="snapshots/shared")
    )
    assert store.samplers.release("s", 9.0) == ["snapshots/own"]
    released = store.samplers.get("s:sample:0")
    assert released is not None
    assert released.released_at == 9.0
    assert store.samplers.snapshot_directories() == ["snapshots/shared"]


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../x", "a b", "ü", "x" * 129, "a\\b", "a\n"])
def test_names_that_could_escape_the_directory_are_rejected(name: str) -> None:
    with pytest.raises(InvalidInput, match="not a valid checkpoint name"):
        check_name(name)


def test_a_directory_appears_complete_or_not_at_all(tmp_path: Path) -> None:
    directories = Directories(tmp_path)
    with directories.checkpoint("s:train:0", "weights", "a") as writing:
        (writing.temporary / "file").write_bytes(b"12345")
        assert not directories.resolve(writing.final).exists()
    assert writing.final == "checkpoints/s~train~0/weights/a"
    assert writing.size_bytes == 5
    assert (directories.resolve(writing.final) / "file").read_bytes() == b"12345"

    def fail() -> None:
        with directories.checkpoint("s:train:0", "weights", "b") as failing:
            (failing.temporary / "file").write_bytes(b"1")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [p.name for p in (tmp_path / "checkpoints/s~train~0/weights").iterdir()] == ["a"]


def test_overwriting_keeps_the_old_directory_until_the_row_refers_to_the_new_one(tmp_path: Path) -> None:
    directories = Directories(tmp_path)
    with directories.checkpoint("r", "weights", "a") as first:
        pass
    with directories.checkpoint("r", "weights", "a") as second:
        pass
    assert first.final != second.final
    assert directories.resolve(first.final).is_dir()
    assert directories.resolve(second.final).is_dir()
    directories.remove(first.final)
    assert not directories.resolve(first.final).exists()


def test_unreferenced_files_are_removed(tmp_path: Path) -> None:
    directories = Directories(tmp_path)
    with directories.checkpoint("r", "weights", "kept") as kept, directories.snapshot() as dropped:
        pass
    (tmp_path / "checkpoints/r/weights/.unfinished-1").mkdir()
    assert directories.remove_unreferenced([kept.final]) == 2
    assert directories.resolve(kept.final).is_dir()
    assert not directories.resolve(dropped.final).exists()


@pytest.mark.slow
def test_keys_of_an_older_schema_stay_valid(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "engine.db")
    for script in MIGRATIONS[:2]:
        connection.executescript(script)
    connection.executescript("PRAGMA user_version = 2")
    connection.execute("INSERT INTO users VALUES ('ada', 1.0)")
    digest = hashlib.sha256(b"tml-old").digest()
    connection.execute("INSERT INTO api_keys VALUES (?, 'ada', 2.0)", (digest,))
    connection.commit()
    connection.close()
    with Store(tmp_path) as store:
        found = store.users.find_key("tml-old")
        assert found is not None
        assert (found.user_id, found.name, found.created_at, found.revoked_at) == ("ada", "ada", 2.0, None)


def test_a_revoked_key_is_listed_but_no_longer_accepted(store: Store) -> None:
    key, row = store.users.create_key("ada", 1.0, "laptop")
    other, _ = store.users.create_key("bob", 2.0)
    assert store.users.revoke(row.key_id, 3.0)
    assert not store.users.revoke(row.key_id, 4.0), "once"
    assert store.users.find(key) is None
    assert store.users.key(row.key_id) is None
    assert store.users.find(other) == "bob"
    assert [(k.user_id, k.name, k.revoked_at) for k in store.users.all_keys()] == [
        ("ada", "laptop", 3.0),
        ("bob", "bob", None),
    ]


def test_ended_operations_are_numbered_once_and_in_order(store: Store) -> None:
    for number in range(3):
        store.futures.accept(FutureRow(f"r{number}", "ada", "sample", "s:sample:0", number, b"", 1.0))
    done = Outcome.done(b"12345", ResultFormat.JSON)

    def finish(*ids: str) -> None:
        store.finished.add([(each, done) for each in ids], {"r1": Timing(1.5, 7)}, 2.0)
        store.futures.finish([(each, done) for each in ids], 2.0)

    finish("r1")
    finish("r0", "r1")
    rows = store.finished.after("s:sample:0", 0, 0, 10)
    assert [(row.request_id, row.started_at, row.num_tokens, row.num_bytes) for row in rows] == [
        ("r1", 1.5, 7, 5),
        ("r0", None, 0, 5),
    ]
    assert [row.request_id for row in store.finished.after("s:sample:0", 0, rows[0].number, 10)] == ["r0"]
    store.finished.prune(before=3.0)
    finish("r2")
    (last,) = store.finished.after("s:sample:0", 0, 0, 10)
    assert last.number > rows[1].number, "numbers are not reused"


def test_usage_adds_up_per_key(store: Store) -> None:
    key = UsageKey(3600, "ada", "s", "tiny", UsageKind.TRAINING)
    store.usage.add({key: 5})
    store.usage.add({key: 2, replace(key, kind=UsageKind.SAMPLE): 1, replace(key, owner="bob"): 9})
    found = [(a.kind, amount) for a, amount in store.usage.between("ada", 0, 7200)]
    assert found == [(UsageKind.SAMPLE, 1), (UsageKind.TRAINING, 7)]
    assert store.usage.between("ada", 3601, 7200) == []


def test_the_audit_log_is_read_by_user_day_and_category(store: Store) -> None:
    for at, owner, category in (
        (1.0, "ada", "checkpoints"),
        (2.0, "bob", "checkpoints"),
        (3.0, "ada", "projects"),
    ):
        store.audit.add(AuditRow(owner, at, category, "e", details={"n": at}))
    assert [row.at for row in store.audit.between("ada", 0, 10, None, 10)] == [1.0, 3.0]
    assert [row.at for row in store.audit.between(None, 0, 10, "checkpoints", 10)] == [1.0, 2.0]
    assert [row.details["n"] for row in store.audit.between(None, 1.5, 3.0, None, 10)] == [2.0]
    store.audit.prune(before=2.5)
    assert [row.at for row in store.audit.between(None, 0, 10, None, 10)] == [3.0]


def test_users_of_a_directory_without_engine_data_are_not_created(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="tinkex serve"), open_users(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_keys_are_created_and_looked_up_concurrently(store: Store) -> None:
    made: list[str] = []

    def make() -> None:
        for _ in range(20):
            key, _ = store.users.create_key("ada", 1.0)
            assert store.users.find(key) == "ada"
            made.append(key)

    threads = [threading.Thread(target=make, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    assert {store.users.find(key) for key in made} == {"ada"}
    assert len(made) == 80


def test_usage_is_deleted_after_its_retention(store: Store) -> None:
    keys = [UsageKey(hour * HOUR_S, "ada", "s", "tiny", UsageKind.TRAINING) for hour in (1, 2, 3)]
    store.usage.add(dict.fromkeys(keys, 5))
    store.usage.prune(before=2.0 * HOUR_S)
    assert [key for key, _ in store.usage.between("ada", 0, 10 * HOUR_S)] == keys[1:]


def test_a_cached_run_matches_its_row(store: Store) -> None:
    store.sessions.add(SessionRow("s", "ada", 0.0, 0.0))
    store.runs.add(RunRow("s:train:0", "s", "ada", "tiny", 1.0, 1.0, RunStatus.CREATING))

    def get() -> RunRow:
        row = store.runs.get("s:train:0")
        assert row is not None
        return row

    def fail() -> None:
        with store.database.transaction():
            store.runs.set_status("s:train:0", RunStatus.FAILED)
            assert get().status is RunStatus.FAILED
            raise ZeroDivisionError

    assert get().status is RunStatus.CREATING
    with pytest.raises(ZeroDivisionError):
        fail()
    assert get().status is RunStatus.CREATING
    store.runs.set_status("s:train:0", RunStatus.LIVE)
    assert get().status is RunStatus.LIVE
    for moment in (5.0, 5.1, 5.2):
        store.runs.mark_used("s:train:0", moment)
        assert get().used_at == moment
        assert [row.used_at for row in store.runs.list("ada", 10, 0)] == [moment]


def test_a_corrupt_database_is_not_opened(tmp_path: Path) -> None:
    Store(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / "engine.db")) as connection:
        [[page]] = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'runs'").fetchall()
        [[size]] = connection.execute("PRAGMA page_size").fetchall()
    with (tmp_path / "engine.db").open("r+b") as file:
        file.seek((page - 1) * size)
        file.write(b"\xff" * size)
    for _ in range(2):  # the failed open releases the lock
        with pytest.raises(SetupError, match=r"corrupt.*backup"):
            Store(tmp_path)


@pytest.mark.slow
def test_a_locked_database_is_waited_for_once(store: Store) -> None:
    other = sqlite3.connect(store.root / "engine.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    for _ in range(2):
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            store.database.probe()
        [[busy_timeout_ms]] = store.database.all("PRAGMA busy_timeout")
        assert busy_timeout_ms == CONTENDED_BUSY_TIMEOUT_MS
    other.execute("ROLLBACK")
    other.close()
    store.database.probe()
    [[busy_timeout_ms]] = store.database.all("PRAGMA busy_timeout")
    assert busy_timeout_ms == BUSY_TIMEOUT_MS


class SlowDisk(Database):
    """A database whose flush has an outcome only when the test gives it one."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.flushes: list[Future[None]] = []

    def flushed(self) -> Future[None]:
        self.flushes.append(Future())
        return self.flushes[-1]


def test_a_key_is_revoked_on_disk_before_its_revocation_is_reported(tmp_path: Path) -> None:
    database = SlowDisk(tmp_path / "engine.db")
    users = Users(database)
    _, row = users.create_key("ada", 0.0)
    with closing(database), ThreadPoolExecutor(1) as pool:
        revoking = pool.submit(users.revoke, row.key_id, 1.0)
        while not database.flushes and not revoking.done():
            time.sleep(0.001)
        assert not revoking.done()
        assert users.all_keys()[0].revoked_at == 1.0  # committed before it is flushed
        database.flushes[0].set_result(None)
        assert revoking.result(30)
        revoking = pool.submit(users.revoke, row.key_id, 2.0)
        while len(database.flushes) < 2:
            time.sleep(0.001)
        database.flushes[1].set_exception(OSError("the disk is gone"))
        with pytest.raises(OSError, match="the disk is gone"):
            revoking.result(30)


@pytest.mark.skipif(os.name != "posix", reason="needs file modes")
def test_a_data_directory_that_others_could_read_is_made_private_and_that_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "engine"
    with Store(root) as store:
        key = store.local_key(0.0)
    caplog.clear()
    root.chmod(0o755)
    database = root / "engine.db"
    database.chmod(0o644)
    with Store(root) as store:
        assert store.users.find(key) == "local"
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (root, *root.iterdir())}
    assert modes.pop("engine") == 0o700
    assert modes.keys() >= {"engine.db", "engine.db-wal", "engine.db-shm", "api_key"}
    assert set(modes.values()) == {0o600}
    assert f"{root} could be accessed by other accounts: its mode was 0755 and is now 0700" in caplog.text
    assert "0644 and is now 0600" in caplog.text
    caplog.clear()
    with Store(root):
        assert not caplog.records


@pytest.mark.skipif(os.name != "posix", reason="needs file modes")
def test_a_new_database_is_private_whatever_the_umask_is(tmp_path: Path) -> None:
    previous = os.umask(0o022)
    try:
        with Store(tmp_path / "engine") as store:
            files = [path for path in store.root.iterdir() if path.name.startswith("engine.db")]
            assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    finally:
        os.umask(previous)


def test_a_new_directory_is_flushed_into_each_of_its_parents(tmp_path: Path) -> None:
    flushed: list[Path] = []

    def flush(path: Path) -> None:
        flushed.append(path.relative_to(tmp_path))
        flush_path(path)

    directories = Directories(tmp_path, flush)
    with directories.checkpoint("s:train:0", "weights", "a") as writing:
        assert flushed == [Path(), Path("checkpoints"), Path("checkpoints/s~train~0")], (
            "before anything is in it"
        )
        flushed.clear()
        (writing.temporary / "part").mkdir()
        (writing.temporary / "part" / "file").write_bytes(b"1")
    assert sorted(path.name for path in flushed[:-2]) == ["file", "part"]
    assert flushed[-2].name.startswith(".unfinished-")
    assert flushed[-1] == Path("checkpoints/s~train~0/weights"), "last: the entry of the directory itself"
    for write in (directories.savepoint, directories.snapshot):
        flushed.clear()
        with write() as writing:
            if write == directories.savepoint:
                writing.temporary.write_bytes(b"1")
        assert flushed[0] == Path()
        assert flushed[-1] == Path(writing.final).parent
    flushed.clear()
    temporary = directories.new_asset_path()
    temporary.write_bytes(b"1")
    directories.commit_asset(temporary)
    assert (flushed[0], flushed[-1]) == (Path(), Path("assets"))
