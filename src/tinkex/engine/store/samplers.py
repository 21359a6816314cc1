"""Samplers (sampling sessions), and the immutable weights each samples from."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass

from tinkex.engine.store.database import Database


@dataclass(frozen=True)
class SamplerRow:
    """One sampler: the base model only (no directory), or with the adapter in ``directory``.

    ``model_path`` is set if the adapter is a named checkpoint. The directory of an unnamed snapshot is deleted when its
    session has ended (``released_at``).
    """

    sampler_id: str
    session_id: str
    owner: str
    base_model: str
    created_at: float
    model_path: str | None = None
    directory: str | None = None
    released_at: float | None = None


class Samplers:
    """The samplers of all users."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, row: SamplerRow) -> None:
        """Insert a sampler."""
        with self._database.transaction() as execute:
            execute(
                "INSERT INTO samplers (sampler_id, session_id, owner, base_model, model_path, directory, created_at) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    row.sampler_id,
                    row.session_id,
                    row.owner,
                    row.base_model,
                    row.model_path,
                    row.directory,
                    row.created_at,
                ),
            )

    def get(self, sampler_id: str) -> SamplerRow | None:
        """Returns one sampler, or None."""
        found = self._database.one("SELECT * FROM samplers WHERE sampler_id = ?", (sampler_id,))
        return _sampler(found) if found is not None else None

    def add_client(self, sampler_id: str) -> int:
        """Add a client to a sampler; returns its number, which is unique. The creator is client 0."""
        with self._database.transaction() as execute:
            execute("UPDATE samplers SET num_clients = num_clients + 1 WHERE sampler_id = ?", (sampler_id,))
            row = self._database.one("SELECT num_clients FROM samplers WHERE sampler_id = ?", (sampler_id,))
        assert row is not None, "the sampler exists"
        return int(row["num_clients"])

    def of_session(self, session_id: str) -> Sequence[SamplerRow]:
        """Returns the samplers of one session, oldest first."""
        rows = self._database.all(
            "SELECT * FROM samplers WHERE session_id = ? ORDER BY created_at, rowid", (session_id,)
        )
        return [_sampler(row) for row in rows]

    def release(self, session_id: str, now: float) -> Sequence[str]:
        """Release the unnamed snapshots of a session; returns the directories that are no longer used."""
        with self._database.transaction() as execute:
            rows = self._database.all(
                "SELECT DISTINCT directory FROM samplers WHERE session_id = ? AND released_at IS NULL "
                "AND directory IS NOT NULL AND model_path IS NULL",
                (session_id,),
            )
            execute(
                "UPDATE samplers SET released_at = ? WHERE session_id = ? AND released_at IS NULL",
                (now, session_id),
            )
            kept = set(self.snapshot_directories())
        return [row["directory"] for row in rows if row["directory"] not in kept]

    def snapshot_directories(self) -> Sequence[str]:
        """Returns the directories of all unnamed snapshots."""
        rows = self._database.all(
            "SELECT DISTINCT directory FROM samplers WHERE model_path IS NULL AND directory IS NOT NULL "
            "AND released_at IS NULL"
        )
        return [row["directory"] for row in rows]


def _sampler(row: sqlite3.Row) -> SamplerRow:
    return SamplerRow(
        sampler_id=row["sampler_id"],
        session_id=row["session_id"],
        owner=row["owner"],
        base_model=row["base_model"],
        created_at=row["created_at"],
        model_path=row["model_path"],
        directory=row["directory"],
        released_at=row["released_at"],
    )
