"""Samplers (sampling sessions), and the weights each samples from."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tinkex.engine.store.database import Database


@dataclass(frozen=True)
class SamplerRow:
    """One sampler: the base model only (no directory), or with the adapter in ``directory``.

    ``model_path`` is set if the adapter is a named checkpoint. ``inflight_run_id`` is set if the sampler follows the inflight
    saves of a run: each of them replaces ``directory``. An unnamed snapshot is deleted when its session has ended, or
    newer ones of its run exist and it is no longer used (``released_at``).
    """

    sampler_id: str
    session_id: str
    owner: str
    base_model: str
    created_at: float
    model_path: str | None = None
    directory: str | None = None
    inflight_run_id: str | None = None
    released_at: float | None = None


@dataclass(frozen=True)
class SnapshotRow:
    """The weights of one or more samplers under no name; ``directory`` is relative to the data directory."""

    directory: str
    run_id: str
    owner: str
    created_at: float
    size_bytes: int


class Samplers:
    """The samplers of all users, and their unnamed snapshots."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._opened_at = time.time()
        self._used: dict[str, float] = {}
        """When each snapshot was last used, in memory only: after a restart all count as used."""

    def add(self, row: SamplerRow) -> None:
        """Insert a sampler; one that follows the inflight saves of a run updates the others that do."""
        with self._database.transaction() as execute:
            if row.inflight_run_id is not None:
                execute(
                    "UPDATE samplers SET directory = ? WHERE inflight_run_id = ? AND released_at IS NULL",
                    (row.directory, row.inflight_run_id),
                )
            execute(
                "INSERT INTO samplers (sampler_id, session_id, owner, base_model, model_path, directory, inflight_run_id, "
                "created_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    row.sampler_id,
                    row.session_id,
                    row.owner,
                    row.base_model,
                    row.model_path,
                    row.directory,
                    row.inflight_run_id,
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

    def add_snapshot(self, row: SnapshotRow) -> None:
        """Insert a snapshot; one that exists stays as it is."""
        with self._database.transaction() as execute:
            execute(
                "INSERT INTO snapshots (directory, run_id, owner, created_at, size_bytes) VALUES (?, ?, ?, ?, ?) "
                "ON CONFLICT DO NOTHING",
                (row.directory, row.run_id, row.owner, row.created_at, row.size_bytes),
            )

    def mark_used(self, directory: str, now: float) -> None:
        """Record that a snapshot is in use; safe on any thread."""
        self._used[directory] = now

    def release(self, session_id: str, now: float) -> Sequence[str]:
        """Release the samplers of a session; returns the directories of snapshots that no other session uses."""
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
            return self._delete_snapshots([row["directory"] for row in rows])

    def release_unused(
        self, now: float, *, newest_kept: int, unused_since: float, owner: str | None = None
    ) -> Sequence[str]:
        """Release snapshots of one user, or of all, that are neither among the newest of their run nor used since a time.

        Returns their directories. A snapshot with a pending sample is in use.
        """
        if self._opened_at >= unused_since:
            return []
        with self._database.transaction():
            rows = self._database.all(
                "SELECT directory FROM (SELECT directory, owner, created_at, "
                "row_number() OVER (PARTITION BY run_id ORDER BY created_at DESC, rowid DESC) AS place FROM snapshots) "
                "WHERE place > ?1 AND created_at < ?2 AND (?3 IS NULL OR owner = ?3) AND directory NOT IN ("
                "SELECT directory FROM futures JOIN samplers ON sampler_id = target "
                "WHERE futures.status = 'pending' AND directory IS NOT NULL) ORDER BY created_at",
                (newest_kept, unused_since, owner),
            )
            unused = [
                row["directory"] for row in rows if self._used.get(row["directory"], 0.0) < unused_since
            ]
            with self._database.transaction() as execute:
                execute.many(
                    "UPDATE samplers SET released_at = ? WHERE directory = ? AND model_path IS NULL AND released_at IS NULL",
                    [(now, directory) for directory in unused],
                )
            return self._delete_snapshots(unused)

    def delete_replaced(self, in_use: Collection[str]) -> Sequence[str]:
        """Delete the snapshots that no sampler refers to, because newer inflight weights have replaced them.

        Returns their directories, without those ``in_use`` by samples that started before.
        """
        with self._database.transaction():
            rows = self._database.all(
                "SELECT directory FROM snapshots WHERE NOT EXISTS (SELECT 1 FROM samplers "
                "WHERE samplers.directory = snapshots.directory AND model_path IS NULL AND released_at IS NULL)"
            )
            return self._delete_snapshots(
                [row["directory"] for row in rows if row["directory"] not in in_use]
            )

    def _delete_snapshots(self, directories: Sequence[str]) -> Sequence[str]:
        """Delete the rows of snapshots that no sampler refers to; returns their directories."""
        deleted = [
            directory
            for directory in directories
            if self._database.one(
                "SELECT 1 FROM samplers WHERE directory = ? AND model_path IS NULL AND released_at IS NULL",
                (directory,),
            )
            is None
        ]
        with self._database.transaction() as execute:
            execute.many("DELETE FROM snapshots WHERE directory = ?", [(each,) for each in deleted])
        for directory in deleted:
            self._used.pop(directory, None)
        return deleted

    def unmeasured_snapshots(self) -> Sequence[str]:
        """Returns the directories of snapshots that 0.1 wrote, whose sizes are not recorded."""
        return [
            row["directory"]
            for row in self._database.all("SELECT directory FROM snapshots WHERE size_bytes = 0")
        ]

    def set_size(self, directory: str, size_bytes: int) -> None:
        """Record the size of a snapshot."""
        with self._database.transaction() as execute:
            execute("UPDATE snapshots SET size_bytes = ? WHERE directory = ?", (size_bytes, directory))

    def snapshot_directories(self) -> Sequence[str]:
        """Returns the directories of all unnamed snapshots."""
        rows = self._database.all(
            "SELECT DISTINCT directory FROM samplers WHERE model_path IS NULL AND directory IS NOT NULL "
            "AND released_at IS NULL"
        )
        return [row["directory"] for row in rows]

    def prune(self, seen_before: float, owner: str | None = None) -> int:
        """Delete a batch of the released samplers of sessions last active before the given time; returns how many."""
        return self._database.delete_batch(
            "samplers",
            "rowid",
            "released_at IS NOT NULL AND session_id IN (SELECT session_id FROM sessions WHERE seen_at < ?1) "
            "AND (?2 IS NULL OR owner = ?2)",
            (seen_before, owner),
        )


def _sampler(row: sqlite3.Row) -> SamplerRow:
    return SamplerRow(
        sampler_id=row["sampler_id"],
        session_id=row["session_id"],
        owner=row["owner"],
        base_model=row["base_model"],
        created_at=row["created_at"],
        model_path=row["model_path"],
        directory=row["directory"],
        inflight_run_id=row["inflight_run_id"],
        released_at=row["released_at"],
    )
