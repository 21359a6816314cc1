"""Idempotency keys of checkpoint copies: a repeated request returns the first copy."""

from __future__ import annotations

from tinkex.engine.store.checkpoints import CheckpointRow, Checkpoints
from tinkex.engine.store.database import Database


class Copies:
    """The checkpoint copies of all users, by idempotency key."""

    def __init__(self, database: Database, checkpoints: Checkpoints) -> None:
        self._database = database
        self._checkpoints = checkpoints

    def add(self, copy: CheckpointRow, idempotency_key: str) -> None:
        """Record the copy that a request made."""
        with self._database.transaction() as execute:
            execute(
                "INSERT INTO copies (owner, idempotency_key, tinker_path, created_at) VALUES (?, ?, ?, ?)",
                (copy.owner, idempotency_key, copy.path, copy.created_at),
            )

    def find(self, owner: str, idempotency_key: str) -> CheckpointRow | None:
        """Returns the copy made under a key, or None if there is none or it has been deleted."""
        row = self._database.one(
            "SELECT tinker_path FROM copies WHERE owner = ? AND idempotency_key = ?", (owner, idempotency_key)
        )
        if row is None:
            return None
        run_id, kind, name = row["tinker_path"].removeprefix("tinker://").split("/")
        return self._checkpoints.get(run_id, kind, name)

    def prune(self, before: float) -> int:
        """Delete a batch of keys older than ``before``; returns how many."""
        return self._database.delete_batch("copies", "owner, idempotency_key", "created_at < ?", (before,))
