"""The audit log: who did what, and when."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tinkex.engine.store.database import Database


@dataclass(frozen=True)
class AuditRow:
    """One audit log entry; ``category`` is the kind of object it concerns."""

    owner: str
    at: float
    category: str
    event: str
    model_id: str | None = None
    tinker_path: str | None = None
    details: Mapping[str, Any] = field(default_factory=dict)


class Audit:
    """The audit log of all users."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, row: AuditRow) -> None:
        """Add an entry."""
        with self._database.transaction() as execute:
            execute(
                "INSERT INTO audit (owner, at, category, event, model_id, tinker_path, details) VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    row.owner,
                    row.at,
                    row.category,
                    row.event,
                    row.model_id,
                    row.tinker_path,
                    json.dumps(dict(row.details)),
                ),
            )

    def between(
        self, owner: str | None, start: float, stop: float, category: str | None, limit: int
    ) -> Sequence[AuditRow]:
        """Returns the entries in a time range, oldest first; optionally of one user or one category."""
        rows = self._database.all(
            "SELECT * FROM audit WHERE at >= ?1 AND at < ?2 AND (?3 IS NULL OR owner = ?3) AND (?4 IS NULL OR category = ?4) "
            "ORDER BY at, number LIMIT ?5",
            (start, stop, owner, category, limit),
        )
        return [_audit(row) for row in rows]

    def prune(self, before: float) -> int:
        """Delete a batch of entries older than ``before``; returns how many."""
        return self._database.delete_batch("audit", "number", "at < ?", (before,))


def _audit(row: sqlite3.Row) -> AuditRow:
    return AuditRow(
        owner=row["owner"],
        at=row["at"],
        category=row["category"],
        event=row["event"],
        model_id=row["model_id"],
        tinker_path=row["tinker_path"],
        details=json.loads(row["details"]),
    )
