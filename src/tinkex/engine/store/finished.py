"""Ended operations, in the order in which they ended.

Every ended operation gets the next number in the commit that records its outcome. Numbers are never reused, not even
after a restart, so a poller with a cursor misses nothing, and a session's trace can be drawn.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tinkex.engine.store.database import Database
from tinkex.engine.store.futures import FutureStatus, Outcome

CLIENT_NUMBERS = 1_000_000_000
"""The size of the seq_id range of each client of a sampler."""


@dataclass(frozen=True)
class Timing:
    """When an operation started running, if it did, how many tokens it has, and how many were computed for it."""

    started_at: float | None = None
    num_tokens: int = 0
    tokens_computed: int = 0


@dataclass(frozen=True)
class FinishedRow:
    """One ended operation; times are seconds since 1970."""

    number: int
    request_id: str
    target: str
    seq_id: int | None
    kind: str
    accepted_at: float
    started_at: float | None
    finished_at: float
    num_tokens: int
    tokens_computed: int
    num_bytes: int
    succeeded: bool


class Finished:
    """The ended operations of all users, within the retention time."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, outcomes: Sequence[tuple[str, Outcome]], timings: Mapping[str, Timing], now: float) -> None:
        """Number operations that end now. Must be called in the commit that records their outcomes, before that."""
        rows = []
        for request_id, outcome in outcomes:
            timing = timings.get(request_id, Timing())
            done = outcome.status is FutureStatus.DONE
            tokens = (timing.num_tokens, timing.tokens_computed)
            rows.append((timing.started_at, now, *tokens, len(outcome.result), done, request_id))
        with self._database.transaction() as execute:
            execute.many(
                "INSERT INTO finished (request_id, target, seq_id, kind, accepted_at, started_at, finished_at, num_tokens, "
                "tokens_computed, num_bytes, succeeded) "
                "SELECT request_id, target, seq_id, kind, created_at, ?, ?, ?, ?, ?, ? FROM futures "
                "WHERE request_id = ? AND status = 'pending'",
                rows,
            )

    def after(self, target: str, client: int, number: int, limit: int) -> Sequence[FinishedRow]:
        """Returns the operations of one sampler client that ended after ``number``, in order."""
        first = client * CLIENT_NUMBERS
        rows = self._database.all(
            "SELECT * FROM finished WHERE target = ? AND number > ? AND seq_id >= ? AND seq_id < ? "
            "ORDER BY number LIMIT ?",
            (target, number, first, first + CLIENT_NUMBERS, limit),
        )
        return [_finished(row) for row in rows]

    def of_session(self, session_id: str) -> Sequence[FinishedRow]:
        """Returns the ended operations of a session's runs and samplers, in order."""
        rows = self._database.all(
            "SELECT finished.* FROM finished WHERE target IN (SELECT run_id FROM runs WHERE session_id = ?1 "
            "UNION SELECT sampler_id FROM samplers WHERE session_id = ?1) ORDER BY number",
            (session_id,),
        )
        return [_finished(row) for row in rows]

    def prune(self, before: float) -> int:
        """Delete a batch of operations that ended before the given time; returns how many."""
        return self._database.delete_batch("finished", "number", "finished_at < ?", (before,))


def _finished(row: sqlite3.Row) -> FinishedRow:
    return FinishedRow(
        number=row["number"],
        request_id=row["request_id"],
        target=row["target"],
        seq_id=row["seq_id"],
        kind=row["kind"],
        accepted_at=row["accepted_at"],
        started_at=row["started_at"],
        finished_at=row["finished_at"],
        num_tokens=row["num_tokens"],
        tokens_computed=row["tokens_computed"],
        num_bytes=row["num_bytes"],
        succeeded=bool(row["succeeded"]),
    )
