"""Checkpoints: owner, base model, expiry and directory of saved weights."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from tinkex.engine.store.database import Database
from tinkex.engine.store.runs import decode_lora, decode_object, encode_lora, encode_object
from tinkex.types.training import LoraConfig


class CheckpointKind(StrEnum):
    """The middle part of a checkpoint path."""

    WEIGHTS = "weights"
    SAMPLER_WEIGHTS = "sampler_weights"
    EXTERNAL_WEIGHTS = "external_weights"


@dataclass(frozen=True)
class CheckpointRow:
    """One checkpoint; ``directory`` is relative to the data directory."""

    run_id: str
    kind: CheckpointKind
    name: str
    owner: str
    base_model: str
    lora: LoraConfig
    has_optimizer: bool
    created_at: float
    size_bytes: int
    directory: str
    optimizer_config: Mapping[str, Any] | None = None
    expires_at: float | None = None
    public: bool = False
    user_metadata: Mapping[str, Any] | None = None

    @property
    def checkpoint_id(self) -> str:
        """Kind and name, as shown in listings."""
        return f"{self.kind}/{self.name}"

    @property
    def path(self) -> str:
        """The path that clients use: ``tinker://<run>/<kind>/<name>``."""
        return f"tinker://{self.run_id}/{self.kind}/{self.name}"


class CheckpointPosition(NamedTuple):
    """The place of a checkpoint in a search, which is sorted by time (newest first) and then by path."""

    created_at: float
    run_id: str
    kind: str
    name: str


@dataclass(frozen=True)
class CheckpointQuery:
    """Which checkpoints a search returns; None matches all. Others' checkpoints match only if they are public."""

    reader: str
    owners: Sequence[str] | None = None
    kind: str | None = None
    base_models: Sequence[str] | None = None
    project_ids: Sequence[str] | None = None
    """Of the reader's own: the projects of others are private."""


class Checkpoints:
    """The checkpoints of all users. Expired checkpoints stay in the table until maintenance deletes them."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def put(self, row: CheckpointRow) -> str | None:
        """Insert or replace a checkpoint; returns the directory of the replaced one, if any."""
        with self._database.transaction() as execute:
            replaced = self.get(row.run_id, row.kind, row.name)
            self.delete(row)
            execute(
                "INSERT INTO checkpoints (run_id, kind, name, owner, base_model, lora, optimizer_config, "
                "has_optimizer, created_at, expires_at, size_bytes, public, user_metadata, directory) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    row.run_id,
                    row.kind,
                    row.name,
                    row.owner,
                    row.base_model,
                    encode_lora(row.lora),
                    encode_object(row.optimizer_config),
                    row.has_optimizer,
                    row.created_at,
                    row.expires_at,
                    row.size_bytes,
                    row.public,
                    encode_object(row.user_metadata),
                    row.directory,
                ),
            )
        return replaced.directory if replaced is not None else None

    def get(self, run_id: str, kind: str, name: str) -> CheckpointRow | None:
        """Returns one checkpoint, or None."""
        found = self._database.one(
            "SELECT * FROM checkpoints WHERE run_id = ? AND kind = ? AND name = ?", (run_id, kind, name)
        )
        return _checkpoint(found) if found is not None else None

    def last(self, run_id: str, kind: str, now: float, *, public_only: bool = False) -> CheckpointRow | None:
        """Returns the newest live checkpoint of a run, or None."""
        found = self._database.one(
            "SELECT * FROM checkpoints WHERE run_id = ? AND kind = ? AND (expires_at IS NULL OR expires_at > ?) "
            "AND (public OR NOT ?) ORDER BY created_at DESC, rowid DESC LIMIT 1",
            (run_id, kind, now, public_only),
        )
        return _checkpoint(found) if found is not None else None

    def of_run(self, run_id: str, now: float, hidden: str = "") -> Sequence[CheckpointRow]:
        """Returns the live checkpoints of one run except those of the ``hidden`` kind, oldest first."""
        rows = self._database.all(
            "SELECT * FROM checkpoints WHERE run_id = ? AND kind != ? AND (expires_at IS NULL OR expires_at > ?) "
            "ORDER BY created_at, rowid",
            (run_id, hidden, now),
        )
        return [_checkpoint(row) for row in rows]

    def of_owner(
        self, owner: str, now: float, limit: int, offset: int, hidden: str = ""
    ) -> Sequence[CheckpointRow]:
        """Returns a page of one user's live checkpoints except those of the ``hidden`` kind, newest first."""
        rows = self._database.all(
            "SELECT * FROM checkpoints WHERE owner = ? AND kind != ? AND (expires_at IS NULL OR expires_at > ?) "
            "ORDER BY created_at DESC, rowid DESC LIMIT ? OFFSET ?",
            (owner, hidden, now, limit, offset),
        )
        return [_checkpoint(row) for row in rows]

    def search(
        self, query: CheckpointQuery, now: float, limit: int, after: CheckpointPosition | None = None
    ) -> Sequence[CheckpointRow]:
        """Returns live checkpoints that match, newest first, from the one that follows ``after`` on."""
        conditions = ["(c.expires_at IS NULL OR c.expires_at > ?)"]
        values: list[str | float] = [now]
        if query.owners is None or list(query.owners) != [query.reader]:
            conditions.append("(c.public OR c.owner = ?)")
            values.append(query.reader)
        for column, allowed in (
            ("c.owner", query.owners),
            ("c.kind", None if query.kind is None else [query.kind]),
            ("c.base_model", query.base_models),
            ("s.project_id", query.project_ids),
            ("c.owner", None if query.project_ids is None else [query.reader]),
        ):
            if allowed is not None:
                conditions.append(f"{column} IN ({', '.join('?' * len(allowed))})")
                values += allowed
        if after is not None:
            conditions.append(
                "(c.created_at < ? OR (c.created_at = ? AND (c.run_id, c.kind, c.name) > (?, ?, ?)))"
            )
            values += [after.created_at, *after]
        rows = self._database.all(
            "SELECT c.* FROM checkpoints AS c LEFT JOIN runs AS r ON r.run_id = c.run_id "  # noqa: S608 -- constants
            f"LEFT JOIN sessions AS s ON s.session_id = r.session_id WHERE {' AND '.join(conditions)} "
            "ORDER BY c.created_at DESC, c.run_id, c.kind, c.name LIMIT ?",
            (*values, limit),
        )
        return [_checkpoint(row) for row in rows]

    def count(self, owner: str, now: float, hidden: str = "") -> int:
        """Returns the number of one user's live checkpoints, not counting those of the ``hidden`` kind."""
        row = self._database.one(
            "SELECT count(*) AS total FROM checkpoints WHERE owner = ? AND kind != ? "
            "AND (expires_at IS NULL OR expires_at > ?)",
            (owner, hidden, now),
        )
        return int(row["total"]) if row is not None else 0

    def bytes_by_session(self, now: float) -> Sequence[tuple[str, str, str, int]]:
        """Returns the size of the live checkpoints by owner, session and base model."""
        rows = self._database.all(
            "SELECT c.owner, coalesce(r.session_id, '') AS session_id, c.base_model, sum(c.size_bytes) AS total "
            "FROM checkpoints AS c LEFT JOIN runs AS r ON r.run_id = c.run_id "
            "WHERE c.expires_at IS NULL OR c.expires_at > ? GROUP BY 1, 2, 3",
            (now,),
        )
        return [(row["owner"], row["session_id"], row["base_model"], row["total"]) for row in rows]

    def expired(self, before: float) -> Sequence[CheckpointRow]:
        """Returns the checkpoints that expired before the given time."""
        rows = self._database.all("SELECT * FROM checkpoints WHERE expires_at <= ?", (before,))
        return [_checkpoint(row) for row in rows]

    def page_after(self, number: int, limit: int) -> tuple[Sequence[CheckpointRow], int]:
        """Returns a page of all checkpoints and the number to continue from; 0 starts at the beginning, and follows the end."""
        rows = self._database.all(
            "SELECT rowid AS number, * FROM checkpoints WHERE rowid > ? ORDER BY rowid LIMIT ?",
            (number, limit),
        )
        return [_checkpoint(row) for row in rows], rows[-1]["number"] if len(rows) == limit else 0

    def delete(self, row: CheckpointRow) -> None:
        """Delete a checkpoint's row."""
        with self._database.transaction() as execute:
            execute(
                "DELETE FROM checkpoints WHERE run_id = ? AND kind = ? AND name = ?",
                (row.run_id, row.kind, row.name),
            )

    def set_expiry(self, row: CheckpointRow, expires_at: float | None) -> None:
        """Change a checkpoint's expiry; None means that it never expires."""
        with self._database.transaction() as execute:
            execute(
                "UPDATE checkpoints SET expires_at = ? WHERE run_id = ? AND kind = ? AND name = ?",
                (expires_at, row.run_id, row.kind, row.name),
            )

    def set_public(self, row: CheckpointRow, *, public: bool) -> None:
        """Make a checkpoint readable by every user of this server, or only by its owner."""
        with self._database.transaction() as execute:
            execute(
                "UPDATE checkpoints SET public = ? WHERE run_id = ? AND kind = ? AND name = ?",
                (public, row.run_id, row.kind, row.name),
            )

    def directories(self) -> Sequence[str]:
        """Returns the directories of all checkpoints."""
        return [row["directory"] for row in self._database.all("SELECT directory FROM checkpoints")]


def _checkpoint(row: sqlite3.Row) -> CheckpointRow:
    lora = decode_lora(row["lora"])
    assert lora is not None  # the column is NOT NULL
    return CheckpointRow(
        run_id=row["run_id"],
        kind=CheckpointKind(row["kind"]),
        name=row["name"],
        owner=row["owner"],
        base_model=row["base_model"],
        lora=lora,
        has_optimizer=bool(row["has_optimizer"]),
        created_at=row["created_at"],
        size_bytes=row["size_bytes"],
        directory=row["directory"],
        optimizer_config=decode_object(row["optimizer_config"]),
        expires_at=row["expires_at"],
        public=bool(row["public"]),
        user_metadata=decode_object(row["user_metadata"]),
    )
