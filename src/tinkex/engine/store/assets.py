"""Assets: images that users uploaded, identified by the digest of their content."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from tinkex.engine.store.database import Database


@dataclass(frozen=True)
class AssetRow:
    """One image; ``file`` is relative to the data directory."""

    owner: str
    asset_id: str
    name: str
    format: str
    size_bytes: int
    sha256: str
    file: str
    created_at: float
    expires_at: float


class Assets:
    """The assets of all users. Expired assets stay until maintenance deletes them, but lookups do not return them."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def put(self, row: AssetRow) -> str | None:
        """Insert an asset, or replace the user's asset with the same content; returns the replaced asset's file."""
        with self._database.transaction() as execute:
            old = self._database.one(
                "SELECT file FROM assets WHERE owner = ? AND asset_id = ?", (row.owner, row.asset_id)
            )
            execute("DELETE FROM assets WHERE owner = ? AND asset_id = ?", (row.owner, row.asset_id))
            execute(
                "INSERT INTO assets (owner, asset_id, name, format, size_bytes, sha256, file, created_at, "
                "expires_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                astuple(row),
            )
        return str(old["file"]) if old is not None else None

    def get(self, owner: str, asset_id: str, now: float) -> AssetRow | None:
        """Returns a user's live asset, or None."""
        row = self._database.one(
            "SELECT * FROM assets WHERE owner = ? AND asset_id = ? AND expires_at > ?", (owner, asset_id, now)
        )
        return AssetRow(**dict(row)) if row is not None else None

    def of_owner(self, owner: str, now: float, limit: int, offset: int) -> Sequence[AssetRow]:
        """Returns a page of a user's live assets, newest first."""
        rows = self._database.all(
            "SELECT * FROM assets WHERE owner = ? AND expires_at > ? "
            "ORDER BY created_at DESC, asset_id LIMIT ? OFFSET ?",
            (owner, now, limit, offset),
        )
        return [AssetRow(**dict(row)) for row in rows]

    def count(self, owner: str, now: float) -> int:
        """Returns the number of a user's live assets."""
        row = self._database.one(
            "SELECT count(*) AS num FROM assets WHERE owner = ? AND expires_at > ?", (owner, now)
        )
        return int(row["num"]) if row is not None else 0

    def expired(self, now: float) -> Sequence[AssetRow]:
        """Returns the expired assets."""
        return [
            AssetRow(**dict(row))
            for row in self._database.all("SELECT * FROM assets WHERE expires_at <= ?", (now,))
        ]

    def files(self) -> Sequence[str]:
        """Returns the file of every asset in the table."""
        return [row["file"] for row in self._database.all("SELECT file FROM assets")]

    def delete(self, row: AssetRow) -> bool:
        """Delete an asset's row unless the asset has been uploaded again; returns whether it was deleted."""
        with self._database.transaction() as execute:
            return bool(
                execute(
                    "DELETE FROM assets WHERE owner = ? AND asset_id = ? AND file = ?",
                    (row.owner, row.asset_id, row.file),
                )
            )
