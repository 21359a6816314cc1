"""Usage per hour and user: tokens trained and sampled, checkpoints saved and stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tinkex.engine.store.database import Database

HOUR_S = 3600


class UsageKind(StrEnum):
    """The kind of usage that is counted."""

    TRAINING = "training"
    TRAINING_COMPUTED = "training_computed"
    """Tokens of training that were computed: fewer than those sent if datums share prefixes."""
    PREFILL = "prefill"
    PREFILL_CACHED = "prefill_cached"
    SAMPLE = "sample"
    CHECKPOINT = "checkpoint"
    STORAGE = "storage"
    """In byte-seconds."""


@dataclass(frozen=True)
class UsageKey:
    """What an amount is aggregated by; ``hour`` is the start of the hour in seconds since 1970."""

    hour: int
    owner: str
    session_id: str
    base_model: str
    kind: UsageKind


class Usage:
    """The usage of all users."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, amounts: Mapping[UsageKey, int]) -> None:
        """Add amounts to the counts."""
        with self._database.transaction() as execute:
            execute.many(
                "INSERT INTO usage (hour, owner, session_id, base_model, kind, amount) VALUES (?, ?, ?, ?, ?, ?) "
                "ON CONFLICT DO UPDATE SET amount = amount + excluded.amount",
                [
                    (key.hour, key.owner, key.session_id, key.base_model, key.kind, amount)
                    for key, amount in amounts.items()
                ],
            )

    def between(self, owner: str, start: float, stop: float) -> Sequence[tuple[UsageKey, int]]:
        """Returns the usage of one user in the hours that start in a time range, in order."""
        rows = self._database.all(
            "SELECT * FROM usage WHERE hour >= ? AND hour < ? AND owner = ? ORDER BY hour, session_id, base_model, kind",
            (start, stop, owner),
        )
        return [
            (
                UsageKey(
                    row["hour"], row["owner"], row["session_id"], row["base_model"], UsageKind(row["kind"])
                ),
                row["amount"],
            )
            for row in rows
        ]

    def prune(self, before: float) -> int:
        """Delete a batch of amounts of hours that started before the given time; returns how many."""
        key = "hour, owner, session_id, base_model, kind"
        return self._database.delete_batch("usage", key, "hour < ?", (before,))
