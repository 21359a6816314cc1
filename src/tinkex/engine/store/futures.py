"""Accepted operations: their requests, statuses and results.

A row exists before its request_id is returned to the client, so no accepted operation is lost in a crash. The row of a
sample holds the request until the sample has ended; requests of training operations are in the journal. Results are
deleted after a retention time; the row then stays as expired.
"""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tinkex.engine.store.database import BATCH_ROWS, Database, first_batch


class FutureStatus(StrEnum):
    """The status of an accepted operation."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"
    EXPIRED = "expired"


class ResultFormat(StrEnum):
    """The encoding of a result."""

    JSON = "json"
    PROTO = "proto"


@dataclass(frozen=True)
class FutureRow:
    """One accepted operation. ``target`` is the run, sampling session or session that ``seq_id`` belongs to."""

    request_id: str
    owner: str
    kind: str
    target: str
    seq_id: int | None
    payload_hash: bytes
    created_at: float
    status: FutureStatus = FutureStatus.PENDING
    request: bytes | None = None


@dataclass(frozen=True)
class Outcome:
    """How an operation ended: ``result`` in ``format``, or ``error`` with the side at fault as ``category``."""

    status: FutureStatus
    result: bytes = b""
    format: ResultFormat = ResultFormat.JSON
    error: str = ""
    category: str = ""

    @staticmethod
    def done(result: bytes, format: ResultFormat) -> Outcome:  # noqa: A002 -- the column's name
        """A success."""
        return Outcome(FutureStatus.DONE, result=result, format=format)

    @staticmethod
    def failed(error: str, category: str) -> Outcome:
        """A failure."""
        return Outcome(FutureStatus.FAILED, error=error, category=category)


class Futures:
    """The accepted operations of all users."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def accept(self, row: FutureRow) -> None:
        """Record an operation as accepted."""
        with self._database.transaction() as execute:
            execute(
                "INSERT INTO futures (request_id, owner, kind, target, seq_id, payload_hash, request, status, "
                "created_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    row.request_id,
                    row.owner,
                    row.kind,
                    row.target,
                    row.seq_id,
                    row.payload_hash,
                    row.request,
                    row.status,
                    row.created_at,
                ),
            )

    def get(self, request_id: str) -> FutureRow | None:
        """Returns one operation without its request, or None."""
        found = self._database.one(f"{_SELECT} WHERE request_id = ?", (request_id,))
        return _future(found) if found is not None else None

    def find_by_seq_id(self, target: str, seq_id: int) -> FutureRow | None:
        """Returns the operation accepted under this seq_id, or None."""
        found = self._database.one(f"{_SELECT} WHERE target = ? AND seq_id = ?", (target, seq_id))
        return _future(found) if found is not None else None

    def last_of(self, target: str, kind: str) -> FutureRow | None:
        """Returns the newest accepted operation of a kind for a run, or None."""
        found = self._database.one(
            f"{_SELECT} WHERE target = ? AND seq_id IS NOT NULL AND kind = ? ORDER BY seq_id DESC LIMIT 1",
            (target, kind),
        )
        return _future(found) if found is not None else None

    def outcome(self, request_id: str) -> Outcome | None:
        """Returns the outcome of an operation, or None if it is pending or unknown."""
        row = self._database.one(
            "SELECT status, format, result, error, category FROM futures WHERE request_id = ? AND status != 'pending'",
            (request_id,),
        )
        return _outcome(row) if row is not None else None

    def find_with_outcome(
        self, request_id: str, max_bytes: int = sys.maxsize
    ) -> tuple[FutureRow, Outcome | None] | None:
        """Returns one operation without its request, and its outcome; None if it is unknown.

        There is no outcome if the operation has not ended, or if its result has more than ``max_bytes``, which is not read.
        """
        row = self._database.one(
            "SELECT request_id, owner, kind, target, seq_id, payload_hash, status, created_at, format, category, error, "
            "length(result) > ?2 AS is_large, CASE WHEN length(result) <= ?2 THEN result END AS result "
            "FROM futures WHERE request_id = ?1",
            (request_id, max_bytes),
        )
        if row is None:
            return None
        future = _future(row)
        has_outcome = future.status is not FutureStatus.PENDING and not row["is_large"]
        return future, _outcome(row) if has_outcome else None

    def request(self, request_id: str) -> bytes | None:
        """Returns the request of a pending sample, or None."""
        row = self._database.one("SELECT request FROM futures WHERE request_id = ?", (request_id,))
        return row["request"] if row is not None else None

    def pending(self) -> Sequence[FutureRow]:
        """Returns all pending operations without their requests, in the order of acceptance."""
        return [
            _future(row) for row in self._database.all(f"{_SELECT} WHERE status = 'pending' ORDER BY rowid")
        ]

    def pending_of(self, session_id: str) -> Sequence[FutureRow]:
        """Returns the pending operations of a session's runs and samplers, without their requests."""
        rows = self._database.all(
            f"{_SELECT} WHERE status = 'pending' AND target IN (SELECT run_id FROM runs WHERE session_id = ?1 "  # noqa: S608 -- constants
            "UNION SELECT sampler_id FROM samplers WHERE session_id = ?1) ORDER BY created_at, request_id",
            (session_id,),
        )
        return [_future(row) for row in rows]

    def finish(self, outcomes: Iterable[tuple[str, Outcome]], now: float) -> None:
        """Record the outcomes of operations in one commit; operations that have ended are not changed."""
        with self._database.transaction() as execute:
            execute.many(
                "UPDATE futures SET status = ?, format = ?, result = ?, error = ?, category = ?, finished_at = ?, "
                "request = NULL WHERE request_id = ? AND status = 'pending'",
                [
                    (o.status, o.format, o.result, o.error or None, o.category or None, now, request_id)
                    for request_id, o in outcomes
                ],
            )

    def mark_fetched(self, request_ids: Iterable[str], now: float) -> None:
        """Record that clients have fetched these results, in batches."""
        rows = [(now, request_id) for request_id in request_ids]
        for start in range(0, len(rows), BATCH_ROWS):
            with self._database.transaction() as execute:
                execute.many(
                    "UPDATE futures SET fetched_at = ? WHERE request_id = ? AND fetched_at IS NULL",
                    rows[start : start + BATCH_ROWS],
                )

    def drop(self, owner: str, request_ids: Iterable[str]) -> None:
        """Delete results that the client has acknowledged."""
        with self._database.transaction() as execute:
            execute.many(
                "UPDATE futures SET status = 'expired', result = NULL, error = NULL "
                "WHERE request_id = ? AND owner = ? AND status IN ('done', 'failed')",
                [(request_id, owner) for request_id in request_ids],
            )

    def prune(self, *, fetched_before: float, finished_before: float, expired_before: float) -> int:
        """Delete a batch of results or rows past their retention; returns how many, 0 if none are left."""
        return (
            self._expire("fetched_at < ?", fetched_before)
            or self._expire("finished_at < ?", finished_before)
            or self._database.delete_batch(
                "futures", "rowid", "status = 'expired' AND finished_at < ?", (expired_before,)
            )
        )

    def expire_fetched(self, owner: str, before: float) -> int:
        """Delete a batch of one user's results that were fetched before the given time; returns how many."""
        return self._expire("fetched_at < ? AND owner = ?", before, owner)

    def _expire(self, condition: str, *parameters: str | float) -> int:
        """Delete a batch of results."""
        with self._database.transaction() as execute:
            rows = self._database.all(
                "SELECT rowid AS number, coalesce(length(result), 0) AS size FROM futures "  # noqa: S608 -- constants
                f"WHERE status IN ('done', 'failed') AND {condition} LIMIT {BATCH_ROWS}",
                parameters,
            )
            return execute.many(
                "UPDATE futures SET status = 'expired', result = NULL, error = NULL WHERE rowid = ?",
                [(row["number"],) for row in first_batch(rows)],
            )


_SELECT = "SELECT request_id, owner, kind, target, seq_id, payload_hash, status, created_at FROM futures"


def _outcome(row: sqlite3.Row) -> Outcome:
    return Outcome(
        status=FutureStatus(row["status"]),
        result=row["result"] or b"",
        format=ResultFormat(row["format"] or ResultFormat.JSON),
        error=row["error"] or "",
        category=row["category"] or "",
    )


def _future(row: sqlite3.Row) -> FutureRow:
    return FutureRow(
        request_id=row["request_id"],
        owner=row["owner"],
        kind=row["kind"],
        target=row["target"],
        seq_id=row["seq_id"],
        payload_hash=row["payload_hash"],
        created_at=row["created_at"],
        status=FutureStatus(row["status"]),
    )
