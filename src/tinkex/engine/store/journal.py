"""The journal: the requests of every run since its last savepoint, and the turns in which they ran.

A request is written with a digest before its request_id is returned to the client. When it has run, its turn is
recorded: operations of one pass share a turn, so that a replay runs the same batches and gets bitwise identical results.
A savepoint prunes everything it covers.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from tinkex.engine.store.database import BATCH_ROWS, Database, first_batch


@dataclass(frozen=True)
class JournalRow:
    """One accepted operation of a run, with its request body."""

    request_id: str
    run_id: str
    seq_id: int
    owner: str
    kind: str
    num_tokens: int
    body: bytes = field(repr=False)
    digest: bytes = b""

    @property
    def intact(self) -> bool:
        """Whether the body matches its digest."""
        return self.digest == body_digest(self.body)


@dataclass(frozen=True)
class TurnEntry:
    """One operation that has run: ``place`` is its position within its turn."""

    turn: int
    place: int
    run_id: str
    seq_id: int
    request_id: str
    succeeded: bool
    prefix_sharing: bool = False
    """Whether the datums of its turn shared their prefixes."""
    num_shards: int = 1
    """In how many shards its pass was computed."""
    shard_threads: int = 0
    """The compute threads of the shards, where the pass was cut; 0: those of the lane."""


def body_digest(body: bytes) -> bytes:
    """Returns the digest that a request body is verified with."""
    return hashlib.blake2b(body, digest_size=16).digest()


class Journal:
    """The requests and turns of every run since its last savepoint."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def accept(self, row: JournalRow) -> None:
        """Record a request."""
        with self._database.transaction() as execute:
            execute(
                "INSERT INTO journal (request_id, run_id, seq_id, owner, kind, num_tokens, digest, body) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    row.request_id,
                    row.run_id,
                    row.seq_id,
                    row.owner,
                    row.kind,
                    row.num_tokens,
                    body_digest(row.body),
                    row.body,
                ),
            )

    def get(self, request_id: str) -> JournalRow | None:
        """Returns one request, or None."""
        row = self._database.one("SELECT * FROM journal WHERE request_id = ?", (request_id,))
        return _journal_row(row) if row is not None else None

    def pending(self, run_id: str) -> Sequence[str]:
        """Returns the ids of the requests of a run that have not run, ordered by seq_id."""
        rows = self._database.all(
            "SELECT request_id FROM journal WHERE run_id = ? AND request_id NOT IN "
            "(SELECT request_id FROM turns WHERE run_id = ?) ORDER BY seq_id",
            (run_id, run_id),
        )
        return [row["request_id"] for row in rows]

    def add_turns(self, entries: Sequence[TurnEntry]) -> None:
        """Record the turns in which operations ran."""
        if not entries:
            return
        with self._database.transaction() as execute:
            execute.many(
                "INSERT INTO turns "
                "(turn, place, run_id, seq_id, request_id, succeeded, prefix_sharing, num_shards, shard_threads) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [
                    (
                        e.turn,
                        e.place,
                        e.run_id,
                        e.seq_id,
                        e.request_id,
                        e.succeeded,
                        e.prefix_sharing,
                        e.num_shards,
                        e.shard_threads,
                    )
                    for e in entries
                ],
            )

    def drop_unrun(self, request_ids: Iterable[str]) -> None:
        """Delete requests that will never run; their seq_ids, and all lower ones, stay used."""
        names = [(request_id,) for request_id in request_ids]
        if not names:
            return
        with self._database.transaction() as execute:
            execute.many(
                "INSERT INTO used_numbers SELECT run_id, seq_id, 1 FROM journal WHERE request_id = ? "
                "ON CONFLICT DO NOTHING",
                names,
            )
            execute.many("DELETE FROM journal WHERE request_id = ?", names)

    def use_number(self, run_id: str, seq_id: int) -> None:
        """Record a seq_id under which nothing will run."""
        with self._database.transaction() as execute:
            execute("INSERT INTO used_numbers VALUES (?, ?, 0) ON CONFLICT DO NOTHING", (run_id, seq_id))

    def used_numbers(self, run_id: str) -> Sequence[int]:
        """Returns the seq_ids since the savepoint under which nothing will run."""
        rows = self._database.all(
            "SELECT seq_id FROM used_numbers WHERE run_id = ? ORDER BY seq_id", (run_id,)
        )
        return [row["seq_id"] for row in rows]

    def last_seq(self, run_id: str) -> int | None:
        """Returns the highest seq_id that has run or was skipped since the savepoint, or None."""
        row = self._database.one(
            "SELECT max(seq_id) AS last FROM (SELECT seq_id FROM turns WHERE run_id = ? "
            "UNION ALL SELECT seq_id FROM used_numbers WHERE run_id = ? AND and_below)",
            (run_id, run_id),
        )
        return row["last"] if row is not None else None

    def last_turn(self) -> int:
        """Returns the newest recorded turn; 0 if there is none."""
        row = self._database.one(
            "SELECT max((SELECT coalesce(max(turn), 0) FROM turns), "
            "(SELECT coalesce(max(turn), 0) FROM savepoints)) AS last"
        )
        return int(row["last"]) if row is not None else 0

    def runs_sharing_turns(self, run_ids: Iterable[str]) -> AbstractSet[str]:
        """Returns these runs and, transitively, all runs that shared a turn with one of them since their savepoints.

        They are saved and replayed together: the results of a shared pass depend on every run in it.
        """
        found: set[str] = set()
        waiting = set(run_ids)
        while waiting:
            run_id = waiting.pop()
            found.add(run_id)
            rows = self._database.all(
                "SELECT DISTINCT other.run_id AS run_id FROM turns AS own JOIN turns AS other ON other.turn = own.turn "
                "WHERE own.run_id = ?",
                (run_id,),
            )
            waiting |= {row["run_id"] for row in rows} - found
        return found

    def turns(self, run_ids: Iterable[str]) -> Sequence[TurnEntry]:
        """Returns the turns of these runs since their savepoints, in order."""
        entries = [
            TurnEntry(
                row["turn"],
                row["place"],
                row["run_id"],
                row["seq_id"],
                row["request_id"],
                bool(row["succeeded"]),
                prefix_sharing=bool(row["prefix_sharing"]),
                num_shards=row["num_shards"],
                shard_threads=row["shard_threads"],
            )
            for run_id in run_ids
            for row in self._database.all("SELECT * FROM turns WHERE run_id = ?", (run_id,))
        ]
        return sorted(entries, key=lambda entry: (entry.turn, entry.place))

    def prune(self, run_id: str, *, through_turn: int, next_seq: int) -> None:
        """Delete what a savepoint after ``through_turn`` covers."""
        with self._database.transaction() as execute:
            execute(
                "DELETE FROM journal WHERE request_id IN (SELECT request_id FROM turns WHERE run_id = ? AND turn <= ?)",
                (run_id, through_turn),
            )
            execute("DELETE FROM turns WHERE run_id = ? AND turn <= ?", (run_id, through_turn))
            execute("DELETE FROM used_numbers WHERE run_id = ? AND seq_id < ?", (run_id, next_seq))

    def delete_bodies(self, run_id: str) -> int:
        """Delete a batch of the requests of a run that has ended and that no other run's replay needs; returns how many."""
        with self._database.transaction() as execute:
            rows = self._database.all(
                "SELECT rowid AS number, length(body) AS size FROM journal WHERE run_id = ? LIMIT ?",
                (run_id, BATCH_ROWS),
            )
            return execute.many(
                "DELETE FROM journal WHERE rowid = ?", [(row["number"],) for row in first_batch(rows)]
            )

    def delete_run(self, run_id: str) -> None:
        """Delete all entries of a run that has ended and that no other run's replay needs."""
        with self._database.transaction() as execute:
            for table in ("journal", "turns", "used_numbers"):
                execute(f"DELETE FROM {table} WHERE run_id = ?", (run_id,))  # noqa: S608 -- names above

    def __len__(self) -> int:
        row = self._database.one("SELECT count(*) AS total FROM journal")
        return int(row["total"]) if row is not None else 0

    def runs(self) -> AbstractSet[str]:
        """Returns the runs with entries in the journal."""
        return {
            row["run_id"]
            for row in self._database.all(
                "SELECT run_id FROM journal UNION SELECT run_id FROM turns UNION SELECT run_id FROM used_numbers"
            )
        }


def _journal_row(row: sqlite3.Row) -> JournalRow:
    return JournalRow(
        request_id=row["request_id"],
        run_id=row["run_id"],
        seq_id=row["seq_id"],
        owner=row["owner"],
        kind=row["kind"],
        num_tokens=row["num_tokens"],
        body=row["body"],
        digest=row["digest"],
    )
