from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

import pytest

from tinkex.engine.store import JournalRow, SavepointRow, Store, TurnEntry
from tinkex.engine.store.flushing import Flusher
from tinkex.errors import SetupError


@pytest.fixture
def store(tmp_path: Path):
    with Store(tmp_path / "engine") as opened:
        yield opened


def accept(store: Store, run: str, seq_id: int) -> str:
    request_id = f"{run}-{seq_id}"
    store.journal.accept(JournalRow(request_id, run, seq_id, "ada", "optim_step", 0, b"body"))
    return request_id


def add_turn(store: Store, turn: int, *operations: tuple[str, int]) -> None:
    store.journal.add_turns(
        [
            TurnEntry(turn, place, run, seq, f"{run}-{seq}", succeeded=True)
            for place, (run, seq) in enumerate(operations)
        ]
    )


def test_requests_that_have_not_run_are_pending_ordered_by_seq_id(store: Store) -> None:
    for seq_id in (3, 1, 2):
        accept(store, "a", seq_id)
    add_turn(store, 1, ("a", 1))
    assert store.journal.pending("a") == ["a-2", "a-3"]
    assert store.journal.last_seq("a") == 1


def test_a_changed_body_is_detected(store: Store) -> None:
    request_id = accept(store, "a", 1)
    row = store.journal.get(request_id)
    assert row is not None
    assert row.intact
    with store.database.transaction() as execute:
        execute("UPDATE journal SET body = ?", (b"bodY",))
    row = store.journal.get(request_id)
    assert row is not None
    assert not row.intact


def test_runs_that_shared_turns_are_found_transitively(store: Store) -> None:
    for turn, members in enumerate(["ab", "bc", "d", "de"], start=1):
        for run in members:
            accept(store, run, turn)
        add_turn(store, turn, *((run, turn) for run in members))
    assert store.journal.runs_sharing_turns(["a"]) == {"a", "b", "c"}
    assert store.journal.runs_sharing_turns(["e"]) == {"d", "e"}
    assert store.journal.runs_sharing_turns(["z"]) == {"z"}
    assert [(e.turn, e.run_id) for e in store.journal.turns({"a", "b", "c"})] == [
        (1, "a"),
        (1, "b"),
        (2, "b"),
        (2, "c"),
    ]


def test_pruning_keeps_later_turns_and_pending_requests(store: Store) -> None:
    for seq_id in range(1, 5):
        accept(store, "a", seq_id)
    accept(store, "b", 1)
    add_turn(store, 1, ("a", 1), ("b", 1))
    add_turn(store, 2, ("a", 2))
    add_turn(store, 3, ("a", 3))
    store.journal.use_number("a", 2)
    store.journal.use_number("a", 9)
    store.journal.prune("a", through_turn=2, next_seq=3)
    assert [e.seq_id for e in store.journal.turns(["a"])] == [3]
    assert store.journal.pending("a") == ["a-4"]
    assert store.journal.get("a-1") is None
    assert store.journal.get("b-1") is not None
    assert store.journal.used_numbers("a") == [9]
    store.journal.delete_run("a")
    assert store.journal.runs() == {"b"}


def test_dropped_seq_ids_count_as_passed_and_rejected_ones_do_not(store: Store) -> None:
    store.journal.use_number("a", 7)
    assert store.journal.last_seq("a") is None
    store.journal.drop_unrun([accept(store, "a", 4)])
    assert store.journal.last_seq("a") == 4
    assert store.journal.pending("a") == []
    assert store.journal.used_numbers("a") == [4, 7]


def test_turn_numbers_continue_after_all_turns_were_pruned(store: Store) -> None:
    assert store.journal.last_turn() == 0
    store.savepoints.put(SavepointRow("a", 41, 3, "savepoints/x", 1, b"d"))
    assert store.journal.last_turn() == 41
    accept(store, "a", 3)
    add_turn(store, 42, ("a", 3))
    assert store.journal.last_turn() == 42


def test_a_savepoint_replaces_the_previous_one(store: Store) -> None:
    first, second = (SavepointRow("a", n, n, f"savepoints/{n}", 1, b"d") for n in (1, 2))
    assert store.savepoints.put(first) is None
    assert store.savepoints.put(second) == first.file
    assert store.savepoints.all() == [second]
    assert store.savepoints.delete("a") == second.file
    assert store.savepoints.delete("a") is None


def test_an_interrupted_savepoint_leaves_no_file(store: Store) -> None:
    with pytest.raises(RuntimeError), store.directories.savepoint() as writing:  # noqa: PT012 -- the block is the test
        writing.temporary.write_bytes(b"half")
        raise RuntimeError
    assert list((store.root / "savepoints").iterdir()) == []
    with store.directories.savepoint() as writing:
        writing.temporary.write_bytes(b"whole")
    assert store.directories.resolve(writing.final).read_bytes() == b"whole"
    assert writing.size_bytes == 5
    assert store.directories.remove_unreferenced([writing.final]) == 0
    assert store.directories.remove_unreferenced([]) == 1


def test_concurrent_waiters_share_a_flush(tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.touch()
    flusher = Flusher(file)
    threads = [threading.Thread(target=lambda: flusher.flushed().result(timeout=30)) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not flusher.flushed().cancel()
    flusher.close()
    with pytest.raises(OSError, match="closing"):
        flusher.flushed().result()


def test_a_failed_commit_leaves_nothing_behind_and_the_database_usable(store: Store) -> None:
    store.database.all("PRAGMA max_page_count = 1")
    with pytest.raises(sqlite3.OperationalError, match="full"):
        store.journal.accept(JournalRow("big", "a", 1, "ada", "optim_step", 0, bytes(10_000_000)))
    store.database.all("PRAGMA max_page_count = 1000000")
    assert store.journal.pending("a") == []
    accept(store, "a", 1)
    assert len(store.journal.pending("a")) == 1


def test_a_file_that_is_not_a_database_is_rejected_with_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "engine.db").write_bytes(b"this is not a database, and longer than a header" * 40)
    with pytest.raises(SetupError, match="cannot be opened"):
        Store(tmp_path)
