"""Training runs, and the status of their live weights."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import msgspec

from tinkex.engine.store.database import BATCH_ROWS, Database
from tinkex.types.training import LoraConfig


class RunStatus(StrEnum):
    """The status of a run's live weights."""

    CREATING = "creating"
    """create_model was accepted and has not run yet."""
    LIVE = "live"
    """In memory, or restored on demand."""
    CORRUPTED = "corrupted"
    """Lost: the savepoint or journal is corrupt."""
    RELEASED = "released"
    """Released: unloaded, or the session ended."""
    FAILED = "failed"
    """create_model failed."""


@dataclass(frozen=True)
class RunRow:
    """One training run; ``lora`` is None until the run's weights exist."""

    run_id: str
    session_id: str
    owner: str
    base_model: str
    created_at: float
    used_at: float
    status: RunStatus
    lora: LoraConfig | None = None
    optimizer_config: Mapping[str, Any] | None = None
    user_metadata: Mapping[str, Any] | None = None
    lane: str | None = None
    """The trainer that holds it; None until it is placed."""


MAX_CACHED = 4096
USED_INTERVAL_S = 1.0


class Runs:
    """The training runs of all users.

    Every operation reads its run and updates its last use, so rows are cached and uses are written in batches. Both
    change only while this thread holds the database lock.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._cache: dict[str, RunRow] = {}
        self._used: dict[str, float] = {}
        self._used_written_at = 0.0

    def add(self, row: RunRow) -> None:
        """Insert a run."""
        with self._database.transaction() as execute:
            execute(
                "INSERT INTO runs (run_id, session_id, owner, base_model, lora, optimizer_config, user_metadata, "
                "created_at, used_at, status) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    row.run_id,
                    row.session_id,
                    row.owner,
                    row.base_model,
                    encode_lora(row.lora),
                    encode_object(row.optimizer_config),
                    encode_object(row.user_metadata),
                    row.created_at,
                    row.used_at,
                    row.status,
                ),
            )

    def get(self, run_id: str) -> RunRow | None:
        """Returns one run, or None."""
        cached = self._cache.get(run_id)
        if cached is not None:
            return cached
        with self._database.exclusive() as is_committed:
            found = self._database.one("SELECT * FROM runs WHERE run_id = ?", (run_id,))
            row = _run(found) if found is not None else None
            if row is not None and is_committed:
                if len(self._cache) >= MAX_CACHED:
                    self._cache.clear()
                self._cache[run_id] = row
        return row

    def list(
        self,
        owner: str,
        limit: int,
        offset: int,
        project_id: str | None = None,
        public_at: float | None = None,
    ) -> Sequence[RunRow]:
        """Returns a page of the runs of one user, optionally of one project, last used first.

        ``public_at`` adds other users' runs with a checkpoint that is public at that time.
        """
        if self._used:
            self._write_used()
        rows = self._database.all(
            f"SELECT * {_VISIBLE} ORDER BY used_at DESC, run_id LIMIT ?4 OFFSET ?5",
            (owner, project_id, public_at, limit, offset),
        )
        return [_run(row) for row in rows]

    def count(self, owner: str, project_id: str | None = None, public_at: float | None = None) -> int:
        """Returns how many runs :meth:`list` returns without a limit."""
        row = self._database.one(f"SELECT count(*) AS total {_VISIBLE}", (owner, project_id, public_at))
        return int(row["total"]) if row is not None else 0

    def is_public(self, run_id: str, now: float) -> bool:
        """Returns whether a live checkpoint of a run is public."""
        row = self._database.one(
            "SELECT 1 FROM checkpoints WHERE run_id = ? AND public AND (expires_at IS NULL OR expires_at > ?)",
            (run_id, now),
        )
        return row is not None

    def count_in_use(self, owner: str, seen_after: float) -> int:
        """Returns how many runs of a user have not ended, in sessions that have not finished and were active after a time."""
        row = self._database.one(
            "SELECT count(*) AS total FROM runs JOIN sessions USING (session_id) "
            "WHERE runs.owner = ? AND status IN ('live', 'creating') AND finished_at IS NULL AND seen_at >= ?",
            (owner, seen_after),
        )
        return int(row["total"]) if row is not None else 0

    def of_session(self, session_id: str) -> Sequence[RunRow]:
        """Returns the runs of one session, oldest first."""
        rows = self._database.all(
            "SELECT * FROM runs WHERE session_id = ? ORDER BY created_at, run_id", (session_id,)
        )
        return [_run(row) for row in rows]

    def with_status(self, *statuses: RunStatus) -> Sequence[RunRow]:
        """Returns all runs with one of these statuses."""
        marks = ", ".join("?" * len(statuses))
        rows = self._database.all(f"SELECT * FROM runs WHERE status IN ({marks})", statuses)  # noqa: S608 -- marks only
        return [_run(row) for row in rows]

    def set_status(self, run_id: str, status: RunStatus) -> None:
        """Set the status of a run."""
        with self._database.transaction() as execute:
            self._cache.pop(run_id, None)
            execute("UPDATE runs SET status = ? WHERE run_id = ?", (status, run_id))

    def set_live(self, run_id: str, base_model: str, lora: LoraConfig) -> None:
        """Set a run's status to live, and its base model and LoRA configuration."""
        with self._database.transaction() as execute:
            self._cache.pop(run_id, None)
            execute(
                "UPDATE runs SET status = ?, base_model = ?, lora = ? WHERE run_id = ?",
                (RunStatus.LIVE, base_model, encode_lora(lora), run_id),
            )

    def set_lane(self, run_ids: Iterable[str], lane: str) -> None:
        """Set the trainer that holds runs."""
        with self._database.transaction() as execute:
            for run_id in run_ids:
                self._cache.pop(run_id, None)
                execute("UPDATE runs SET lane = ? WHERE run_id = ?", (lane, run_id))

    def prune(self, seen_before: float, owner: str | None = None) -> int:
        """Delete a batch of ended runs without checkpoints of sessions last active before the given time; returns how many."""
        with self._database.transaction() as execute:
            rows = self._database.all(
                "SELECT run_id FROM runs WHERE status IN ('released', 'failed', 'corrupted') "
                "AND session_id IN (SELECT session_id FROM sessions WHERE seen_at < ?1) AND (?2 IS NULL OR owner = ?2) "
                "AND NOT EXISTS (SELECT 1 FROM checkpoints WHERE checkpoints.run_id = runs.run_id) "
                "AND NOT EXISTS (SELECT 1 FROM savepoints WHERE savepoints.run_id = runs.run_id) "
                "AND NOT EXISTS (SELECT 1 FROM used_numbers WHERE used_numbers.run_id = runs.run_id) "
                "AND NOT EXISTS (SELECT 1 FROM journal WHERE journal.run_id = runs.run_id) LIMIT ?3",
                (seen_before, owner, BATCH_ROWS),
            )
            for row in rows:
                self._cache.pop(row["run_id"], None)
                self._used.pop(row["run_id"], None)
            return execute.many("DELETE FROM runs WHERE run_id = ?", [(row["run_id"],) for row in rows])

    def mark_used(self, run_id: str, now: float) -> None:
        """Update a run's last use. It is written within a second, or before it is listed; a crash may lose it."""
        with self._database.transaction():
            self._used[run_id] = now
            cached = self._cache.get(run_id)
            if cached is not None:
                self._cache[run_id] = replace(cached, used_at=now)
            if now - self._used_written_at >= USED_INTERVAL_S:
                self._used_written_at = now
                self._write_used()

    def _write_used(self) -> None:
        with self._database.transaction() as execute:
            if self._used:
                rows = [(used_at, run_id) for run_id, used_at in self._used.items()]
                execute.many("UPDATE runs SET used_at = ? WHERE run_id = ?", rows)
                self._used.clear()


_VISIBLE = (
    "FROM runs WHERE (owner = ?1 OR (?3 IS NOT NULL AND run_id IN (SELECT run_id FROM checkpoints "
    "WHERE public AND (expires_at IS NULL OR expires_at > ?3)))) "
    "AND (?2 IS NULL OR session_id IN (SELECT session_id FROM sessions WHERE project_id = ?2))"
)


def encode_lora(lora: LoraConfig | None) -> str | None:
    """Encode a LoRA configuration for its column."""
    return msgspec.json.encode(lora).decode() if lora is not None else None


def decode_lora(text: str | None) -> LoraConfig | None:
    """Decode the LoRA configuration of a row."""
    return msgspec.json.decode(text, type=LoraConfig) if text is not None else None


def encode_object(value: Mapping[str, Any] | None) -> str | None:
    """Encode a JSON object for its column."""
    return json.dumps(dict(value)) if value is not None else None


def decode_object(text: str | None) -> dict[str, Any] | None:
    """Decode the JSON object of a row."""
    if text is None:
        return None
    value: dict[str, Any] = json.loads(text)
    return value


def _run(row: sqlite3.Row) -> RunRow:
    return RunRow(
        run_id=row["run_id"],
        session_id=row["session_id"],
        owner=row["owner"],
        base_model=row["base_model"],
        created_at=row["created_at"],
        used_at=row["used_at"],
        status=RunStatus(row["status"]),
        lora=decode_lora(row["lora"]),
        optimizer_config=decode_object(row["optimizer_config"]),
        user_metadata=decode_object(row["user_metadata"]),
        lane=row["lane"],
    )
