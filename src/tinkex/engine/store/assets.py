"""Assets: images that users uploaded, each under the digest of its content."""

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
    """The assets of every user. Expired ones stay until they are cleared away, but are not found any more."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def put(self, row: AssetRow) -> str | None:
        """Record an asset in the place of the user's older one of the same content; returns that one's file."""
        with self._database.transaction() as execute:
            old = self._database.one(
                "SELECT file FROM assets WHERE owner = ? AND asset_id = ?", (row.owner, row.asset_id)
            )
            execute(
                "INSERT OR REPLACE INTO assets (owner, asset_id, name, format, size_bytes, sha256, file, created_at, "
                "expires_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                astuple(row),
            )
        return str(old["file"]) if old is not None else None

    def get(self, owner: str, asset_id: str, now: float) -> AssetRow | None:
        """A user's live asset, or None."""
        row = self._database.one(
            "SELECT * FROM assets WHERE owner = ? AND asset_id = ? AND expires_at > ?", (owner, asset_id, now)
        )
        return AssetRow(**dict(row)) if row is not None else None

    def of_owner(self, owner: str, now: float, limit: int, offset: int) -> Sequence[AssetRow]:
        """A page of a user's live assets, newest first."""
        rows = self._database.all(
            "SELECT * FROM assets WHERE owner = ? AND expires_at > ? "
            "ORDER BY created_at DESC, asset_id LIMIT ? OFFSET ?",
            (owner, now, limit, offset),
        )
        return [AssetRow(**dict(row)) for row in rows]

    def count(self, owner: str, now: float) -> int:
        """How many live assets a user has."""
        row = self._database.one(
            "SELECT count(*) AS num FROM assets WHERE owner = ? AND expires_at > ?", (owner, now)
        )
        return int(row["num"]) if row is not None else 0

    def total_bytes(self, owner: str | None, now: float) -> int:
        """How much the live assets of one user take, or of all."""
        row = self._database.one(
            "SELECT coalesce(sum(size_bytes), 0) AS total FROM assets "
            "WHERE (?1 IS NULL OR owner = ?1) AND expires_at > ?2",
            (owner, now),
        )
        return int(row["total"]) if row is not None else 0

    def expired(self, now: float) -> Sequence[AssetRow]:
        """The assets whose time is over."""
        return [
            AssetRow(**dict(row))
            for row in self._database.all("SELECT * FROM assets WHERE expires_at <= ?", (now,))
        ]

    def files(self) -> Sequence[str]:
        """The file of every asset on record."""
        return [row["file"] for row in self._database.all("SELECT file FROM assets")]

    def delete(self, row: AssetRow) -> bool:
        """Forget an asset, unless it was uploaded again meanwhile; says whether it is forgotten."""
        with self._database.transaction() as execute:
            return bool(
                execute(
                    "DELETE FROM assets WHERE owner = ? AND asset_id = ? AND file = ?",
                    (row.owner, row.asset_id, row.file),
                )
            )
