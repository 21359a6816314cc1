"""Uploads of external weights: their settings, and how much of each file has arrived."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass

from tinkex.engine.store.database import Database
from tinkex.engine.store.directories import UPLOADS
from tinkex.engine.store.runs import decode_lora, encode_lora
from tinkex.types.training import LoraConfig


@dataclass(frozen=True)
class UploadRow:
    """One upload; ``tinker_path`` is the checkpoint that it became."""

    upload_id: str
    owner: str
    base_model: str
    lora: LoraConfig
    created_at: float
    expires_at: float
    project_id: str | None = None
    tinker_path: str | None = None

    @property
    def directory(self) -> str:
        """Where its files are until it is finished, relative to the data directory."""
        return f"{UPLOADS}/{self.upload_id}"


@dataclass(frozen=True)
class UploadFileRow:
    """One file of an upload: the bytes that are safely on disk, and its size if the client has declared it."""

    upload_id: str
    name: str
    received_bytes: int
    total_bytes: int | None

    @property
    def is_complete(self) -> bool:
        """Whether the whole file is on disk."""
        return self.received_bytes == self.total_bytes


class Uploads:
    """The uploads of all users. A row stays until it expires, so that a repeated finish returns the same checkpoint.

    A file counts against quotas with its ``reserved_bytes``, which a writer raises before it writes.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, row: UploadRow) -> None:
        """Insert an upload."""
        with self._database.transaction() as execute:
            execute(
                "INSERT INTO uploads (upload_id, owner, base_model, lora, project_id, created_at, expires_at) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    row.upload_id,
                    row.owner,
                    row.base_model,
                    encode_lora(row.lora),
                    row.project_id,
                    row.created_at,
                    row.expires_at,
                ),
            )

    def get(self, upload_id: str) -> UploadRow | None:
        """Returns one upload, or None."""
        found = self._database.one("SELECT * FROM uploads WHERE upload_id = ?", (upload_id,))
        return _upload(found) if found is not None else None

    def count_open(self, owner: str) -> int:
        """Returns the number of a user's uploads that are not finished."""
        row = self._database.one(
            "SELECT count(*) AS total FROM uploads WHERE owner = ? AND tinker_path IS NULL", (owner,)
        )
        return int(row["total"]) if row is not None else 0

    def expired(self, before: float) -> Sequence[UploadRow]:
        """Returns the uploads that expired before the given time."""
        rows = self._database.all("SELECT * FROM uploads WHERE expires_at <= ?", (before,))
        return [_upload(row) for row in rows]

    def directories(self) -> Sequence[str]:
        """Returns the directories of all uploads that are not finished."""
        rows = self._database.all("SELECT upload_id FROM uploads WHERE tinker_path IS NULL")
        return [f"{UPLOADS}/{row['upload_id']}" for row in rows]

    def extend(self, upload_id: str, expires_at: float) -> None:
        """Keep an upload until the given time at least."""
        with self._database.transaction() as execute:
            execute(
                "UPDATE uploads SET expires_at = max(expires_at, ?) WHERE upload_id = ?",
                (expires_at, upload_id),
            )

    def delete(self, upload_id: str) -> None:
        """Delete an upload with its files' rows."""
        with self._database.transaction() as execute:
            execute("DELETE FROM upload_files WHERE upload_id = ?", (upload_id,))
            execute("DELETE FROM uploads WHERE upload_id = ?", (upload_id,))

    def finish(self, upload_id: str, tinker_path: str) -> None:
        """Record the checkpoint of an upload, whose files are no longer needed."""
        with self._database.transaction() as execute:
            execute("DELETE FROM upload_files WHERE upload_id = ?", (upload_id,))
            execute("UPDATE uploads SET tinker_path = ? WHERE upload_id = ?", (tinker_path, upload_id))

    # ---- files

    def file(self, upload_id: str, name: str) -> UploadFileRow | None:
        """Returns one file of an upload, or None if nothing of it has arrived."""
        row = self._database.one(
            "SELECT * FROM upload_files WHERE upload_id = ? AND name = ?", (upload_id, name)
        )
        if row is None:
            return None
        return UploadFileRow(row["upload_id"], row["name"], row["received_bytes"], row["total_bytes"])

    def put_file(self, row: UploadFileRow, owner: str, reserved_bytes: int) -> None:
        """Record what has arrived of a file, and what it counts for."""
        with self._database.transaction() as execute:
            execute(
                "INSERT INTO upload_files (upload_id, name, owner, received_bytes, total_bytes, reserved_bytes) "
                "VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET received_bytes = excluded.received_bytes, "
                "total_bytes = excluded.total_bytes, reserved_bytes = excluded.reserved_bytes",
                (row.upload_id, row.name, owner, row.received_bytes, row.total_bytes, reserved_bytes),
            )

    def delete_file(self, upload_id: str, name: str) -> None:
        """Delete the row of a file."""
        with self._database.transaction() as execute:
            execute("DELETE FROM upload_files WHERE upload_id = ? AND name = ?", (upload_id, name))

    def release_reservations(self) -> None:
        """Count only what is on disk; at a start, when nothing is being written."""
        with self._database.transaction() as execute:
            execute(
                "UPDATE upload_files SET reserved_bytes = received_bytes WHERE reserved_bytes != received_bytes"
            )


def _upload(row: sqlite3.Row) -> UploadRow:
    lora = decode_lora(row["lora"])
    assert lora is not None  # the column is NOT NULL
    return UploadRow(
        upload_id=row["upload_id"],
        owner=row["owner"],
        base_model=row["base_model"],
        lora=lora,
        created_at=row["created_at"],
        expires_at=row["expires_at"],
        project_id=row["project_id"],
        tinker_path=row["tinker_path"],
    )
