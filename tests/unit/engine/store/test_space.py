"""Disk space: deletions in batches, a log and a file that shrink, and what each user's rows and files take."""

from __future__ import annotations

import logging
import random
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

import pytest

from tests.unit.engine.store.test_store import checkpoint, future, run, session
from tinkex.engine.lookup import find_sampler
from tinkex.engine.store import (
    AssetRow,
    AuditRow,
    JournalRow,
    LossRow,
    Outcome,
    ResultFormat,
    RunStatus,
    SamplerRow,
    SavepointRow,
    SnapshotRow,
    Store,
    UsageKey,
    UsageKind,
)
from tinkex.engine.store.database import BATCH_BYTES, BATCH_ROWS, MAX_IDLE_WAL_BYTES, Database
from tinkex.engine.store.migrations import MIGRATIONS
from tinkex.errors import Expired, SetupError

PRUNE_ALL = {"fetched_before": 0.0, "finished_before": 100.0, "expired_before": 0.0}
MIB = 1024 * 1024


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "engine") as opened:
        yield opened


def add_results(store: Store, count: int, result: bytes = b"x") -> None:
    """Adds results that ended long ago."""
    with store.database.transaction():
        for number in range(count):
            store.futures.accept(future(f"r{number}", seq_id=number))
        outcome = Outcome.done(result, ResultFormat.JSON)
        store.futures.finish([(f"r{number}", outcome) for number in range(count)], now=1.0)


def wal_bytes(store: Store) -> int:
    return store.database.path.with_name("engine.db-wal").stat().st_size


def num_left(store: Store) -> int:
    rows = store.database.all("SELECT count(*) AS num FROM futures WHERE status = 'done'")
    return int(rows[0]["num"])


def test_results_are_deleted_in_batches_of_few_rows_and_bytes(store: Store) -> None:
    add_results(store, BATCH_ROWS + 1)
    assert store.futures.prune(**PRUNE_ALL) == BATCH_ROWS
    assert store.futures.prune(**PRUNE_ALL) == 1
    assert store.futures.prune(**PRUNE_ALL) == 0
    large = Outcome.done(bytes(BATCH_BYTES // 2), ResultFormat.JSON)
    for number in range(3):
        store.futures.accept(future(f"large{number}", seq_id=1000 + number))
        store.futures.finish([(f"large{number}", large)], now=1.0)
    assert [store.futures.prune(**PRUNE_ALL) for _ in range(3)] == [2, 1, 0]


def test_every_pruned_table_is_pruned_in_batches(store: Store) -> None:
    count = BATCH_ROWS + 1
    add_results(store, count)
    with store.database.transaction() as execute:
        for number in range(count):
            store.audit.add(AuditRow("ada", 1.0, "sessions", "session_create"))
            store.usage.add({UsageKey(1, "ada", f"s{number}", "base", UsageKind.SAMPLE): 1})
            execute("INSERT INTO copies VALUES ('ada', ?, 'tinker://x/weights/y', 1.0)", (f"key{number}",))
            execute(
                "INSERT INTO finished (request_id, target, kind, accepted_at, finished_at, num_tokens, num_bytes, succeeded) "
                "VALUES (?, 't', 'sample', 1.0, 1.0, 1, 1, 1)",
                (f"r{number}",),
            )
            store.sessions.add(session(f"s{number}"))
    for table in (store.audit, store.usage, store.copies, store.finished, store.sessions):
        assert [table.prune(9.0) for _ in range(3)] == [BATCH_ROWS, 1, 0]


@pytest.mark.slow
def test_deleting_many_results_keeps_the_log_small_and_shrinks_the_file(store: Store) -> None:
    path = store.database.path
    add_results(store, 600, bytes(100_000))  # 60 MB, in one transaction
    full = path.stat().st_size + wal_bytes(store)
    assert full > 50 * MIB
    while store.futures.prune(**PRUNE_ALL):
        assert wal_bytes(store) <= MAX_IDLE_WAL_BYTES + 8 * MIB
    assert wal_bytes(store) <= MAX_IDLE_WAL_BYTES
    steps = 1
    while store.database.shrink():
        steps += 1
    assert 10 < steps < 1000, "in steps of many pages, between which others can write"
    assert path.stat().st_size < full / 5
    assert wal_bytes(store) <= MAX_IDLE_WAL_BYTES + 8 * MIB


def old_database(path: Path, version: int = 4) -> None:
    """Writes a database of an earlier version, which cannot shrink."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for step in MIGRATIONS[:version]:
            connection.executescript(step)
        connection.executescript(f"PRAGMA user_version = {version}")
        connection.execute(
            "INSERT INTO sessions (session_id, owner, created_at, seen_at, tags, user_metadata, sdk_version) "
            "VALUES ('s', 'ada', 1.0, 1.0, '[]', ?, '')",
            (f'{{"note": "{"x" * 4_000_000}"}}',),
        )
        connection.execute(
            "INSERT INTO samplers VALUES ('s:sample:0', 's', 'ada', 'b', NULL, 'snapshots/1', 1.0, NULL, 0)"
        )
        assert connection.execute("PRAGMA auto_vacuum").fetchone()[0] == 0


def test_a_small_database_of_an_earlier_version_can_shrink_after_the_first_start(tmp_path: Path) -> None:
    old_database(tmp_path / "engine.db")
    (tmp_path / "snapshots" / "1").mkdir(parents=True)
    (tmp_path / "snapshots" / "1" / "weights").write_bytes(bytes(1000))
    with Store(tmp_path) as store:
        assert store.database.can_shrink
        row = store.sessions.get("s")
        assert row is not None
        assert row.user_metadata == {"note": "x" * 4_000_000}, "rows over the limits of today stay readable"
        assert store.disk_usage.of("ada")["sessions"] > 4_000_000
        assert store.disk_usage.of("ada")["snapshots"] == 1200
        assert store.samplers.snapshot_directories() == ["snapshots/1"]


@pytest.mark.slow
def test_a_database_that_another_program_reads_is_opened_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old_database(tmp_path / "engine.db")
    Database(tmp_path / "engine.db").close()  # migrated, and in WAL mode
    with closing(sqlite3.connect(tmp_path / "engine.db", isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM users").fetchall()
        with caplog.at_level(logging.WARNING, "tinkex.engine"), Store(tmp_path) as store:
            assert store.sessions.get("s") is not None
            if not store.database.can_shrink:
                assert "tinkex doctor --compact" in caplog.text
        reader.execute("COMMIT")


def test_opening_a_database_does_not_write_to_it(tmp_path: Path) -> None:
    path = tmp_path / "engine.db"
    Database(path).close()
    with closing(sqlite3.connect(path, isolation_level=None)) as writer:
        writer.execute("BEGIN IMMEDIATE")  # nobody else can write
        database = Database(path)
        assert database.can_shrink
        writer.execute("COMMIT")
        database.close()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("PRAGMA user_version = -1", "schema version -1"),
        ("PRAGMA user_version = 0", "schema version 0"),
        ("DROP TABLE audit", "lacks"),
        ("DROP TRIGGER futures_added", "lacks trigger futures_added"),
        ("ALTER TABLE runs DROP COLUMN user_metadata", "user_metadata"),
        ("PRAGMA user_version = 2", "cannot be opened"),
    ],
)
def test_a_database_with_an_odd_schema_is_a_setup_error_that_says_what_to_do(
    tmp_path: Path, damage: str, reason: str
) -> None:
    Store(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / "engine.db", isolation_level=None)) as connection:
        if "ALTER" in damage:
            for trigger in ("added", "deleted"):
                connection.execute(f"DROP TRIGGER runs_{trigger}")
        connection.execute(damage)
    with pytest.raises(SetupError, match=rf"{reason}[\s\S]*--data-dir"):
        Store(tmp_path)


def test_a_database_of_another_program_is_not_taken_over(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "engine.db", isolation_level=None)) as connection:
        connection.execute("CREATE TABLE mine (x)")
    with pytest.raises(SetupError, match="not a database of the engine"):
        Store(tmp_path)
    with closing(sqlite3.connect(tmp_path / "engine.db")) as connection:
        assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("mine",)]


@pytest.mark.parametrize(
    "query",
    [
        "SELECT count(*) FROM runs WHERE status IN ('live', 'creating') AND owner = coalesce('ada', owner)",
        "SELECT session_id FROM runs WHERE status = 'live'",
        "SELECT session_id FROM samplers WHERE released_at IS NULL",
        "SELECT number FROM audit WHERE at < 1.0",
        "SELECT rowid FROM futures WHERE status = 'expired' AND finished_at < 1.0",
    ],
)
def test_maintenance_reads_indexes_and_not_the_rows(store: Store, query: str) -> None:
    (step,) = store.database.all(f"EXPLAIN QUERY PLAN {query}")
    assert "COVERING INDEX" in step["detail"] or "samplers_in_use" in step["detail"]


# ---- what each user stores


def recounted(store: Store) -> Mapping[tuple[str, str], int]:
    """What a database whose rows are counted all at once says: the last step of the schema, applied again."""
    copy = sqlite3.connect(":memory:", isolation_level=None)
    with closing(copy), closing(sqlite3.connect(store.database.path)) as source:
        source.backup(copy)
        copy.execute("DELETE FROM disk_usage")
        for (trigger,) in copy.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
            copy.execute(f"DROP TRIGGER {trigger}")
        copy.executescript(MIGRATIONS[5])
        return {(owner, kind): size for owner, kind, size in copy.execute("SELECT * FROM disk_usage") if size}


def counted(store: Store) -> Mapping[tuple[str, str], int]:
    return {
        (owner, kind): size
        for owner in store.disk_usage.by_owner()
        for kind, size in store.disk_usage.of(owner).items()
    }


def test_everything_that_a_user_stores_is_counted_until_it_is_deleted(store: Store) -> None:
    store.sessions.add(session(user_metadata={"note": "x" * 1000}))
    assert store.disk_usage.of("ada")["sessions"] > 1400
    store.runs.add(run(status=RunStatus.RELEASED))
    store.samplers.add_snapshot(SnapshotRow("snapshots/1", "s:train:0", "ada", 1.0, 5000))
    store.samplers.add(SamplerRow("s:sample:0", "s", "ada", "base", 1.0, directory="snapshots/1"))
    store.losses.add(LossRow("s:loss:0", "s", "ada", "mine", 1.0, bytes(2000)))
    store.futures.accept(future("r1"))
    store.futures.finish([("r1", Outcome.done(bytes(3000), ResultFormat.PROTO))], now=1.0)
    store.journal.accept(JournalRow("r2", "s:train:0", 2, "ada", "forward_backward", 1, bytes(4000)))
    store.journal.use_number("s:train:0", 3)
    store.journal.use_number("s:train:0", 3)
    for _ in range(2):  # the second replaces the first
        store.checkpoints.put(checkpoint("c", size_bytes=6000))
        store.savepoints.put(SavepointRow("s:train:0", 1, 2, "savepoints/1", 7000, b""))
        store.assets.put(AssetRow("ada", "a", "a.png", "png", 8000, "", "assets/1", 1.0, 9e9))
    store.audit.add(AuditRow("ada", 1.0, "sessions", "session_create"))
    store.usage.add({UsageKey(1, "ada", "s", "base", UsageKind.SAMPLE): 1})
    used = store.disk_usage.of("ada")
    assert used.keys() == {
        "checkpoints", "images", "journal", "logs", "results", "savepoints", "sessions", "snapshots"
    }  # fmt: skip
    assert (used["checkpoints"], used["savepoints"], used["images"]) == (6500, 7300, 8500)
    assert (used["snapshots"], used["journal"], used["results"]) == (5200, 4500, 3600)
    assert counted(store) == recounted(store)
    assert store.disk_usage.total("ada") == store.disk_usage.total() == sum(used.values())
    assert store.disk_usage.total("bob") == 0

    row = store.checkpoints.get("s:train:0", "weights", "c")
    assert row is not None
    store.checkpoints.delete(row)
    store.journal.delete_run("s:train:0")
    store.savepoints.delete("s:train:0")
    store.assets.delete(AssetRow("ada", "a", "a.png", "png", 8000, "", "assets/1", 1.0, 9e9))
    store.samplers.release("s", 2.0)
    while store.futures.prune(fetched_before=9.0, finished_before=9.0, expired_before=9.0):
        pass
    for table in (store.losses, store.samplers, store.runs, store.sessions, store.audit, store.usage):
        while table.prune(9.0):
            pass
    assert counted(store) == {}
    assert store.sessions.get("s") is None


@pytest.mark.slow
def test_the_count_stays_exact_whatever_is_done(store: Store) -> None:
    rng = random.Random(7)
    owners = ("ada", "bob")
    for owner in owners:
        store.sessions.add(session(owner, owner=owner))
        store.runs.add(run(f"{owner}:train:0", session_id=owner, owner=owner))

    def change(number: int) -> None:
        owner, size = rng.choice(owners), rng.randrange(5000)
        run_id, seq_id = f"{owner}:train:0", rng.randrange(30)
        name = f"{owner}{seq_id}"
        match rng.randrange(10):
            case 0:
                if store.futures.find_by_seq_id(run_id, seq_id) is None:
                    store.futures.accept(future(f"r{number}", run_id, seq_id))
            case 1:
                ended = [
                    (each.request_id, Outcome.failed("ü" * size, "user")) for each in store.futures.pending()
                ]
                store.futures.finish(ended, now=float(number))
            case 2:
                store.futures.prune(
                    fetched_before=0.0, finished_before=number - 20, expired_before=number - 40
                )
            case 3:
                store.checkpoints.put(checkpoint(name, owner=owner, run_id=run_id, size_bytes=size))
            case 4:
                store.savepoints.put(SavepointRow(run_id, 1, 2, "savepoints/1", size, b""))
            case 5:
                store.journal.accept(JournalRow(f"j{number}", run_id, seq_id, owner, "kind", 1, bytes(size)))
            case 6:
                store.journal.drop_unrun([f"j{number - 1}", f"j{number - 2}"])
            case 7:
                store.journal.delete_run(run_id)
            case 8:
                store.assets.put(AssetRow(owner, name, "n", "png", size, "", f"assets/{number}", 1.0, 9e9))
            case 9:
                store.sessions.finish(owner, 1.0, "error", "é" * size)

    for number in range(400):
        change(number)
    assert counted(store) == recounted(store)


def snapshots(store: Store, *names: str) -> None:
    """Adds a run, and a sampler on a snapshot of it for each name, oldest first."""
    store.sessions.add(session())
    store.runs.add(run())
    for number, name in enumerate(names):
        store.samplers.add_snapshot(SnapshotRow(name, "s:train:0", "ada", float(number), 10))
        store.samplers.add(SamplerRow(f"s:sample:{name}", "s", "ada", "base", float(number), directory=name))


def test_snapshots_are_released_when_newer_ones_exist_and_they_are_unused(store: Store) -> None:
    snapshots(store, "unused", "used", "sampling", "new", "newest")
    store.futures.accept(future("r1", target="s:sample:sampling"))
    later = 9e9
    store.samplers.mark_used("used", later - 5.0)
    assert store.samplers.release_unused(later, newest_kept=2, unused_since=later - 10, owner="bob") == []
    assert store.samplers.release_unused(later, newest_kept=2, unused_since=later - 10) == ["unused"]
    released = {row.sampler_id for row in store.samplers.of_session("s") if row.released_at is not None}
    assert released == {"s:sample:unused"}
    assert store.samplers.release_unused(later, newest_kept=2, unused_since=later - 10) == []
    store.futures.finish([("r1", Outcome.done(b"", ResultFormat.JSON))], now=1.0)
    assert store.samplers.release_unused(later, newest_kept=2, unused_since=later) == ["used", "sampling"]
    assert store.samplers.snapshot_directories() == ["new", "newest"]


def test_looking_up_a_sampler_is_a_use_of_its_snapshot(store: Store) -> None:
    snapshots(store, "old", "new")
    before = time.time()
    find_sampler(store, "ada", "s:sample:old")
    assert store.samplers.release_unused(9e9, newest_kept=1, unused_since=before) == []
    assert store.samplers.release_unused(9e9, newest_kept=1, unused_since=8e9) == ["old"]
    with pytest.raises(Expired, match="newer ones of its run exist"):
        find_sampler(store, "ada", "s:sample:old")


def test_snapshots_count_as_used_after_a_restart(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        snapshots(store, "a", "b")
    with Store(tmp_path) as store:
        assert store.samplers.release_unused(9e9, newest_kept=1, unused_since=1e9) == []


def test_replaced_inflight_weights_are_deleted_when_no_sample_uses_them(store: Store) -> None:
    store.sessions.add(session())
    store.runs.add(run())
    for number, name in enumerate(("first", "second", "third")):
        store.samplers.add_snapshot(SnapshotRow(name, "s:train:0", "ada", float(number), 10))
        inflight = SamplerRow(
            f"s:sample:{name}", "s", "ada", "base", 1.0, directory=name, inflight_run_id="s:train:0"
        )
        store.samplers.add(inflight)
    store.samplers.add_snapshot(SnapshotRow("fixed", "s:train:0", "ada", 4.0, 10))
    store.samplers.add(SamplerRow("s:sample:fixed", "s", "ada", "base", 1.0, directory="fixed"))
    assert [row.directory for row in store.samplers.of_session("s")] == ["third", "third", "third", "fixed"]
    assert store.samplers.delete_replaced({"first"}) == ["second"]
    assert store.samplers.delete_replaced(set()) == ["first"]
    assert store.samplers.delete_replaced(set()) == []
    assert sorted(store.samplers.snapshot_directories()) == ["fixed", "third"]
    assert sorted(store.samplers.release("s", 5.0)) == ["fixed", "third"]
    assert store.samplers.delete_replaced(set()) == []


def test_a_session_is_deleted_when_nothing_is_left_of_it(store: Store) -> None:
    store.sessions.add(session(seen_at=5.0))
    store.runs.add(run())
    store.checkpoints.put(checkpoint("c"))
    assert store.runs.prune(9.0) == 0, "it is live"
    store.runs.set_status("s:train:0", RunStatus.RELEASED)
    assert store.runs.prune(9.0) == 0, "it has a checkpoint"
    assert store.sessions.prune(9.0) == 0, "it has a run"
    store.checkpoints.delete(checkpoint("c"))
    assert store.runs.get("s:train:0") is not None
    assert store.runs.prune(5.0) == 0, "it was used"
    assert store.runs.prune(9.0, "bob") == 0
    assert store.runs.prune(9.0, "ada") == 1
    assert store.runs.get("s:train:0") is None
    assert store.sessions.prune(9.0) == 1
