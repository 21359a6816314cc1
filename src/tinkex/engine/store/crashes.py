"""Crashes of the worker that are remembered: the custom losses that are quarantined, and the users who have to wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from enum import StrEnum

from tinkex.engine.store.database import Database

MAX_ROWS = 10_000
"""How many are remembered of each kind, the newest."""


class CrashKind(StrEnum):
    """What is named by a row."""

    LOSS = "loss"
    USER = "user"


@dataclass(frozen=True)
class CrashRow:
    """A custom loss, by its digest, or a user, and the crashes it has caused."""

    kind: CrashKind
    name: str
    num_crashes: int
    reason: str
    """How the worker was lost the last time."""
    crashed_at: float
    expires_at: float


class Crashes:
    """The crashes that losses and users have caused, until they expire."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def record(self, row: CrashRow) -> None:
        """Insert a row, or replace the one of the same loss or user; deletes what has expired by then."""
        with self._database.transaction() as execute:
            execute("DELETE FROM crashes WHERE expires_at <= ?", (row.crashed_at,))
            execute("INSERT OR REPLACE INTO crashes VALUES (?, ?, ?, ?, ?, ?)", astuple(row))
            execute(
                "DELETE FROM crashes WHERE kind = ?1 AND name IN (SELECT name FROM crashes WHERE kind = ?1 "
                "ORDER BY crashed_at DESC LIMIT -1 OFFSET ?2)",
                (row.kind, MAX_ROWS),
            )

    def all(self, now: float) -> Sequence[CrashRow]:
        """Returns what has not expired, oldest first."""
        rows = self._database.all("SELECT * FROM crashes WHERE expires_at > ? ORDER BY crashed_at", (now,))
        return [
            CrashRow(
                CrashKind(row["kind"]),
                row["name"],
                row["num_crashes"],
                row["reason"],
                row["crashed_at"],
                row["expires_at"],
            )
            for row in rows
        ]
