"""Sessions: one per client, active while it sends heartbeats."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinkex.engine.store.database import Database

_ACCESSIBLE = (
    "owner = ?1 OR (?2 IS NOT NULL AND session_id IN (SELECT session_id FROM runs JOIN checkpoints USING (run_id) "
    "WHERE public AND (expires_at IS NULL OR expires_at > ?2)))"
)
"""The sessions of a user (?1), and those with a checkpoint that is public at a time (?2)."""


@dataclass(frozen=True)
class SessionRow:
    """One session; times are seconds since 1970."""

    session_id: str
    owner: str
    created_at: float
    seen_at: float
    tags: Sequence[str] = ()
    user_metadata: Mapping[str, Any] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None
    finished_at: float | None = None
    finish_reason: str | None = None
    finish_detail: str | None = None


class Sessions:
    """The sessions of all users."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, row: SessionRow) -> None:
        """Insert a session."""
        with self._database.transaction() as execute:
            execute(
                "INSERT INTO sessions (session_id, owner, created_at, seen_at, tags, user_metadata, sdk_version, "
                "project_id, display_name) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    row.session_id,
                    row.owner,
                    row.created_at,
                    row.seen_at,
                    json.dumps(list(row.tags)),
                    json.dumps(dict(row.user_metadata or {})),
                    row.sdk_version,
                    row.project_id,
                    row.display_name,
                ),
            )

    def get(self, session_id: str) -> SessionRow | None:
        """Returns one session, or None."""
        found = self._database.one("SELECT * FROM sessions WHERE session_id = ?", (session_id,))
        return _session(found) if found is not None else None

    def list_ids(self, owner: str, limit: int, offset: int, public_at: float | None = None) -> Sequence[str]:
        """Returns the ids of a page of one user's sessions, newest first.

        ``public_at`` adds other users' sessions with a checkpoint that is public at that time.
        """
        rows = self._database.all(
            f"SELECT session_id FROM sessions WHERE {_ACCESSIBLE} ORDER BY created_at DESC, session_id LIMIT ?3 OFFSET ?4",  # noqa: S608 -- a constant
            (owner, public_at, limit, offset),
        )
        return [row["session_id"] for row in rows]

    def list_after(
        self, owner: str, limit: int, after: tuple[float, str], public_at: float | None = None
    ) -> Sequence[SessionRow]:
        """Returns the sessions that :meth:`list_ids` returns after a time of creation and an id."""
        rows = self._database.all(
            f"SELECT * FROM sessions WHERE ({_ACCESSIBLE}) "  # noqa: S608 -- a constant
            "AND (created_at < ?4 OR (created_at = ?4 AND session_id > ?5)) "
            "ORDER BY created_at DESC, session_id LIMIT ?3",
            (owner, public_at, limit, *after),
        )
        return [_session(row) for row in rows]

    def has_project(self, owner: str, project_id: str) -> bool:
        """Returns whether a user has a session in a project."""
        found = self._database.one(
            "SELECT 1 FROM sessions WHERE owner = ? AND project_id = ? LIMIT 1", (owner, project_id)
        )
        return found is not None

    def record_heartbeat(self, session_id: str, now: float) -> None:
        """Update when a session was last active."""
        with self._database.transaction() as execute:
            execute("UPDATE sessions SET seen_at = ? WHERE session_id = ?", (now, session_id))

    def set_project(self, session_id: str, project_id: str) -> None:
        """Move a session, with its runs and checkpoints, into a project."""
        with self._database.transaction() as execute:
            execute("UPDATE sessions SET project_id = ? WHERE session_id = ?", (project_id, session_id))

    def finish(self, session_id: str, now: float, reason: str, detail: str | None) -> bool:
        """Finish a session unless it is finished; returns whether this call did."""
        with self._database.transaction() as execute:
            changed = execute(
                "UPDATE sessions SET finished_at = ?, finish_reason = ?, finish_detail = ? "
                "WHERE session_id = ? AND finished_at IS NULL",
                (now, reason, detail, session_id),
            )
        return changed > 0

    def expired(self, finished_before: float, seen_before: float) -> Sequence[str]:
        """Returns sessions that finished or were last active before the given times and still hold resources, oldest first."""
        rows = self._database.all(
            "SELECT session_id FROM sessions WHERE (finished_at < ? OR seen_at < ?) AND session_id IN ("
            "SELECT session_id FROM runs WHERE status = 'live' "
            "UNION ALL SELECT session_id FROM samplers WHERE released_at IS NULL) "
            "ORDER BY COALESCE(finished_at, seen_at)",
            (finished_before, seen_before),
        )
        return [row["session_id"] for row in rows]

    def prune(self, seen_before: float, owner: str | None = None) -> int:
        """Delete a batch of sessions last active before the given time that have nothing left; returns how many."""
        return self._database.delete_batch(
            "sessions",
            "rowid",
            "seen_at < ?1 AND (?2 IS NULL OR owner = ?2) "
            "AND NOT EXISTS (SELECT 1 FROM runs WHERE runs.session_id = sessions.session_id) "
            "AND NOT EXISTS (SELECT 1 FROM samplers WHERE samplers.session_id = sessions.session_id) "
            "AND NOT EXISTS (SELECT 1 FROM custom_losses WHERE custom_losses.session_id = sessions.session_id)",
            (seen_before, owner),
        )


def _session(row: sqlite3.Row) -> SessionRow:
    return SessionRow(
        session_id=row["session_id"],
        owner=row["owner"],
        created_at=row["created_at"],
        seen_at=row["seen_at"],
        tags=tuple(json.loads(row["tags"])),
        user_metadata=json.loads(row["user_metadata"]),
        sdk_version=row["sdk_version"],
        project_id=row["project_id"],
        display_name=row["display_name"],
        finished_at=row["finished_at"],
        finish_reason=row["finish_reason"],
        finish_detail=row["finish_detail"],
    )
