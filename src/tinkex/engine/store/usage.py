"""What users used, by the hour: tokens trained and sampled, checkpoints saved and kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tinkex.engine.store.database import Database

HOUR_S = 3600


class UsageKind(StrEnum):
    """What is counted."""

    TRAINING = "training"
    PREFILL = "prefill"
    PREFILL_CACHED = "prefill_cached"
    SAMPLE = "sample"
    CHECKPOINT = "checkpoint"
    STORAGE = "storage"
    """In byte-seconds."""


@dataclass(frozen=True)
class Account:
    """Under which heading something is counted; ``hour`` is its start in seconds since 1970."""

    hour: int
    owner: str
    session_id: str
    base_model: str
    kind: UsageKind


class Usage:
    """The usage of every user."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, amounts: Mapping[Account, int]) -> None:
        """Count more."""
        with self._database.transaction() as execute:
            execute.many(
                "INSERT INTO usage (hour, owner, session_id, base_model, kind, amount) VALUES (?, ?, ?, ?, ?, ?) "
                "ON CONFLICT DO UPDATE SET amount = amount + excluded.amount",
                [
                    (a.hour, a.owner, a.session_id, a.base_model, a.kind, amount)
                    for a, amount in amounts.items()
                ],
            )

    def between(self, owner: str, start: float, stop: float) -> Sequence[tuple[Account, int]]:
        """What one user used in the hours that begin in a window, in order."""
        rows = self._database.all(
            "SELECT * FROM usage WHERE hour >= ? AND hour < ? AND owner = ? ORDER BY hour, session_id, base_model, kind",
            (start, stop, owner),
        )
        return [
            (
                Account(
                    row["hour"], row["owner"], row["session_id"], row["base_model"], UsageKind(row["kind"])
                ),
                row["amount"],
            )
            for row in rows
        ]

    def prune(self, before: float) -> None:
        """Forget the hours that began before the given moment."""
        with self._database.transaction() as execute:
            execute("DELETE FROM usage WHERE hour < ?", (before,))
