"""Savepoints: the exact state of each live run after some turn, from which a replay starts.

The file is on disk before its row exists, and the commit that replaces the row also prunes the journal. So a savepoint
and the journal since it are always consistent.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tinkex.engine.store.database import Database


@dataclass(frozen=True)
class SavepointRow:
    """One savepoint: ``file`` is relative to the data directory, ``next_seq`` the first seq_id it does not cover."""

    run_id: str
    turn: int
    next_seq: int
    file: str
    size_bytes: int
    digest: bytes


class Savepoints:
    """The newest savepoint of every run that has one."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def put(self, row: SavepointRow) -> str | None:
        """Insert or replace a savepoint; returns the file of the replaced one, if any."""
        with self._database.transaction() as execute:
            replaced = self.get(row.run_id)
            execute("DELETE FROM savepoints WHERE run_id = ?", (row.run_id,))
            execute(
                "INSERT INTO savepoints (run_id, turn, next_seq, file, size_bytes, digest) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                (row.run_id, row.turn, row.next_seq, row.file, row.size_bytes, row.digest),
            )
        return replaced.file if replaced is not None else None

    def get(self, run_id: str) -> SavepointRow | None:
        """Returns the savepoint of a run, or None."""
        row = self._database.one("SELECT * FROM savepoints WHERE run_id = ?", (run_id,))
        return _savepoint(row) if row is not None else None

    def all(self) -> Sequence[SavepointRow]:
        """Returns the savepoints of all runs."""
        return [_savepoint(row) for row in self._database.all("SELECT * FROM savepoints")]

    def delete(self, run_id: str) -> str | None:
        """Delete the savepoint row of a run; returns its file, if there is one."""
        with self._database.transaction() as execute:
            deleted = self.get(run_id)
            execute("DELETE FROM savepoints WHERE run_id = ?", (run_id,))
        return deleted.file if deleted is not None else None


def file_digest(path: Path) -> bytes:
    """Returns the digest that a savepoint's file is verified with."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _savepoint(row: sqlite3.Row) -> SavepointRow:
    return SavepointRow(
        run_id=row["run_id"],
        turn=row["turn"],
        next_seq=row["next_seq"],
        file=row["file"],
        size_bytes=row["size_bytes"],
        digest=row["digest"],
    )
