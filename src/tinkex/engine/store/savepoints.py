"""Savepoints: the exact state of each live run at some turn, from which a replay starts.

The file is complete and on disk before its row exists, and the row replaces the old one in the same commit that prunes
the journal; so there is always one savepoint and the journal since it.
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
    """One savepoint: ``file`` is relative to the data directory, ``next_seq`` the first number it does not cover."""

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
        """Record a savepoint; returns the file of the one it replaces, if any."""
        with self._database.transaction() as execute:
            replaced = self.get(row.run_id)
            execute(
                "INSERT OR REPLACE INTO savepoints (run_id, turn, next_seq, file, size_bytes, digest) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                (row.run_id, row.turn, row.next_seq, row.file, row.size_bytes, row.digest),
            )
        return replaced.file if replaced is not None else None

    def get(self, run_id: str) -> SavepointRow | None:
        """The savepoint of a run, or None."""
        row = self._database.one("SELECT * FROM savepoints WHERE run_id = ?", (run_id,))
        return _savepoint(row) if row is not None else None

    def all(self) -> Sequence[SavepointRow]:
        """The savepoints of all runs."""
        return [_savepoint(row) for row in self._database.all("SELECT * FROM savepoints")]

    def delete(self, run_id: str) -> str | None:
        """Forget the savepoint of a run; returns its file, if there is one."""
        with self._database.transaction() as execute:
            known = self.get(run_id)
            execute("DELETE FROM savepoints WHERE run_id = ?", (run_id,))
        return known.file if known is not None else None


def file_digest(path: Path) -> bytes:
    """What a savepoint's file is checked against when it is read again."""
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
