"""Which copies were made under which idempotency keys, so that a repeated request makes no second one."""

from __future__ import annotations

from tinkex.engine.store.checkpoints import CheckpointRow, Checkpoints
from tinkex.engine.store.database import Database


class Copies:
    """The copies of every user."""

    def __init__(self, database: Database, checkpoints: Checkpoints) -> None:
        self._database = database
        self._checkpoints = checkpoints

    def add(self, copy: CheckpointRow, idempotency_key: str) -> None:
        """Note the copy a request made."""
        with self._database.transaction() as execute:
            execute(
                "INSERT INTO copies (owner, idempotency_key, tinker_path, created_at) VALUES (?, ?, ?, ?)",
                (copy.owner, idempotency_key, copy.path, copy.created_at),
            )

    def find(self, owner: str, idempotency_key: str) -> CheckpointRow | None:
        """The copy that was made under a key, if it is still there."""
        row = self._database.one(
            "SELECT tinker_path FROM copies WHERE owner = ? AND idempotency_key = ?", (owner, idempotency_key)
        )
        if row is None:
            return None
        run_id, kind, name = row["tinker_path"].removeprefix("tinker://").split("/")
        return self._checkpoints.get(run_id, kind, name)

    def prune(self, before: float) -> None:
        """Forget keys nobody will send again."""
        with self._database.transaction() as execute:
            execute("DELETE FROM copies WHERE created_at < ?", (before,))
