"""What each user stores, in bytes: files and rows, counted by triggers in the transaction that adds or deletes them."""

from __future__ import annotations

from collections.abc import Mapping

from tinkex.engine.store.database import Database


class DiskUsage:
    """The bytes that each user stores, by kind; a row counts with its content and a constant for the rest.

    The kinds are ``checkpoints``, ``snapshots``, ``savepoints``, ``images``, ``uploads`` (of weights, until they are
    finished), ``journal`` (operations since the last savepoint), ``results`` (of operations, and requests for samples),
    ``sessions`` (with their runs, samplers and uploaded losses), ``metrics`` and ``rollouts`` of training loops, and ``logs``
    (audit, usage).
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def of(self, owner: str) -> Mapping[str, int]:
        """Returns the bytes of one user by kind."""
        rows = self._database.all(
            "SELECT kind, bytes FROM disk_usage WHERE owner = ? AND bytes > 0", (owner,)
        )
        return {row["kind"]: row["bytes"] for row in rows}

    def total(self, owner: str | None = None) -> int:
        """Returns the bytes of one user, or of all."""
        condition = "WHERE owner = ?1" if owner is not None else "WHERE ?1 IS NULL"
        row = self._database.one(
            f"SELECT coalesce(sum(bytes), 0) AS total FROM disk_usage {condition}",  # noqa: S608 -- constants
            (owner,),
        )
        return int(row["total"]) if row is not None else 0

    def by_kind(self) -> Mapping[str, int]:
        """Returns the bytes of all users by kind."""
        rows = self._database.all("SELECT kind, sum(bytes) AS total FROM disk_usage GROUP BY kind")
        return {row["kind"]: row["total"] for row in rows}

    def by_owner(self) -> Mapping[str, int]:
        """Returns the bytes of every user."""
        rows = self._database.all("SELECT owner, sum(bytes) AS total FROM disk_usage GROUP BY owner")
        return {row["owner"]: row["total"] for row in rows}
