"""Custom losses that users uploaded: the traced graph and its owner."""

from __future__ import annotations

from dataclasses import dataclass, field

from tinkex.engine.store.database import Database


@dataclass(frozen=True)
class LossRow:
    """One uploaded loss; ``definition`` is the request body that created it."""

    loss_id: str
    session_id: str
    owner: str
    name: str
    created_at: float
    definition: bytes = field(repr=False)


class Losses:
    """The uploaded losses of all users."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, row: LossRow) -> None:
        """Insert a loss."""
        with self._database.transaction() as execute:
            execute(
                "INSERT INTO custom_losses (loss_id, session_id, owner, name, created_at, definition) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                (row.loss_id, row.session_id, row.owner, row.name, row.created_at, row.definition),
            )

    def get(self, loss_id: str) -> LossRow | None:
        """Returns one loss, or None."""
        row = self._database.one("SELECT * FROM custom_losses WHERE loss_id = ?", (loss_id,))
        return LossRow(**dict(row)) if row is not None else None

    def prune(self, seen_before: float, owner: str | None = None) -> int:
        """Delete a batch of the losses of sessions last active before the given time; returns how many."""
        return self._database.delete_batch(
            "custom_losses",
            "rowid",
            "session_id IN (SELECT session_id FROM sessions WHERE seen_at < ?1) AND (?2 IS NULL OR owner = ?2)",
            (seen_before, owner),
        )
