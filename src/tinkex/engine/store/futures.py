"""Accepted operations, from the request as it came in to the result as it goes out.

A row exists before its request_id is told to anyone, with the whole request if it is a sample; those of training
operations are in the journal. So after a crash the engine knows everything that was promised. The request of a sample is
dropped when it has ended. Results stay for a retention time, then only the fact that they existed does.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tinkex.engine.store.database import Database


class FutureStatus(StrEnum):
    """How far an accepted operation has come."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"
    EXPIRED = "expired"


class ResultFormat(StrEnum):
    """How the bytes of a result are to be read."""

    JSON = "json"
    PROTO = "proto"


@dataclass(frozen=True)
class FutureRow:
    """One accepted operation. ``target`` is the run, sampling session or session whose numbering it follows."""

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
    """The accepted operations of every user."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def accept(self, row: FutureRow) -> None:
        """Record an operation; once this returns it is promised."""
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
        """One operation without its request, or None."""
        found = self._database.one(f"{_SELECT} WHERE request_id = ?", (request_id,))
        return _future(found) if found is not None else None

    def at_turn(self, target: str, seq_id: int) -> FutureRow | None:
        """The operation that was accepted under this number, or None."""
        found = self._database.one(f"{_SELECT} WHERE target = ? AND seq_id = ?", (target, seq_id))
        return _future(found) if found is not None else None

    def last_of(self, target: str, kind: str) -> FutureRow | None:
        """The newest operation of a kind that was accepted for a run, or None."""
        found = self._database.one(
            f"{_SELECT} WHERE target = ? AND seq_id IS NOT NULL AND kind = ? ORDER BY seq_id DESC LIMIT 1",
            (target, kind),
        )
        return _future(found) if found is not None else None

    def outcome(self, request_id: str) -> Outcome | None:
        """How an operation ended, or None if it is pending or unknown."""
        row = self._database.one(
            "SELECT status, format, result, error, category FROM futures WHERE request_id = ? AND status != 'pending'",
            (request_id,),
        )
        return _outcome(row) if row is not None else None

    def look(self, request_id: str) -> tuple[FutureRow, Outcome | None] | None:
        """One operation without its request, and how it ended if it has; None if it is unknown."""
        row = self._database.one(
            "SELECT request_id, owner, kind, target, seq_id, payload_hash, status, created_at, format, category, error, result "
            "FROM futures WHERE request_id = ?",
            (request_id,),
        )
        if row is None:
            return None
        future = _future(row)
        return future, _outcome(row) if future.status is not FutureStatus.PENDING else None

    def pending(self) -> Sequence[FutureRow]:
        """Every promised operation that has no outcome yet, with its request, in the order of acceptance."""
        rows = self._database.all(
            "SELECT request_id, owner, kind, target, seq_id, payload_hash, status, created_at, request "
            "FROM futures WHERE status = 'pending' ORDER BY rowid"
        )
        return [_future(row, request=row["request"]) for row in rows]

    def pending_of(self, session_id: str) -> Sequence[FutureRow]:
        """What the runs and samplers of a session have been promised and do not have yet, without the requests."""
        rows = self._database.all(
            f"{_SELECT} WHERE status = 'pending' AND target IN (SELECT run_id FROM runs WHERE session_id = ?1 "  # noqa: S608 -- constants
            "UNION SELECT sampler_id FROM samplers WHERE session_id = ?1) ORDER BY created_at, request_id",
            (session_id,),
        )
        return [_future(row) for row in rows]

    def finish(self, outcomes: Iterable[tuple[str, Outcome]], now: float) -> None:
        """Record how operations ended, all in one commit; an operation ends once."""
        with self._database.transaction() as execute:
            execute.many(
                "UPDATE futures SET status = ?, format = ?, result = ?, error = ?, category = ?, finished_at = ?, "
                "request = NULL WHERE request_id = ? AND status = 'pending'",
                [
                    (o.status, o.format, o.result, o.error or None, o.category or None, now, request_id)
                    for request_id, o in outcomes
                ],
            )

    def fetched(self, request_ids: Iterable[str], now: float) -> None:
        """Note that these results have reached their caller."""
        with self._database.transaction() as execute:
            execute.many(
                "UPDATE futures SET fetched_at = ? WHERE request_id = ? AND fetched_at IS NULL",
                [(now, request_id) for request_id in request_ids],
            )

    def drop(self, owner: str, request_ids: Iterable[str]) -> None:
        """Let go of results their caller says it has."""
        with self._database.transaction() as execute:
            execute.many(
                "UPDATE futures SET status = 'expired', result = NULL, error = NULL "
                "WHERE request_id = ? AND owner = ? AND status IN ('done', 'failed')",
                [(request_id, owner) for request_id in request_ids],
            )

    def prune(self, *, fetched_before: float, finished_before: float, expired_before: float) -> int:
        """Drop results past their retention, and rows long expired; says how many expired now."""
        expire = "UPDATE futures SET status = 'expired', result = NULL, error = NULL WHERE status IN ('done', 'failed')"
        with self._database.transaction() as execute:
            expired = execute(f"{expire} AND fetched_at < ?", (fetched_before,))
            expired += execute(f"{expire} AND finished_at < ?", (finished_before,))
            execute("DELETE FROM futures WHERE status = 'expired' AND finished_at < ?", (expired_before,))
        return expired


_SELECT = "SELECT request_id, owner, kind, target, seq_id, payload_hash, status, created_at FROM futures"


def _outcome(row: sqlite3.Row) -> Outcome:
    return Outcome(
        status=FutureStatus(row["status"]),
        result=row["result"] or b"",
        format=ResultFormat(row["format"] or ResultFormat.JSON),
        error=row["error"] or "",
        category=row["category"] or "",
    )


def _future(row: sqlite3.Row, request: bytes | None = None) -> FutureRow:
    return FutureRow(
        request_id=row["request_id"],
        owner=row["owner"],
        kind=row["kind"],
        target=row["target"],
        seq_id=row["seq_id"],
        payload_hash=row["payload_hash"],
        created_at=row["created_at"],
        status=FutureStatus(row["status"]),
        request=request,
    )
