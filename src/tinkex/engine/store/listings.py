"""What people look at: runs, checkpoints, operations, keys and usage, of one user or of all, by a connection that only reads.

An ``owner`` limits what is found to that user's; None finds that of all users.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tinkex.engine.store.reading import Rows
from tinkex.engine.store.runs import decode_lora, decode_object
from tinkex.types.training import LoraConfig


@dataclass(frozen=True)
class RunFilter:
    """Which runs are listed; empty fields match all."""

    text: str = ""
    """A part of the run's id, base model, owner or metadata, or of the name of its session."""
    status: str = ""
    base_model: str = ""
    owner: str = ""


@dataclass(frozen=True)
class ListedRun:
    """A run with the name of its session, and how far its loop is."""

    run_id: str
    session_id: str
    owner: str
    base_model: str
    status: str
    created_at: float
    used_at: float
    display_name: str | None
    lora: LoraConfig | None
    user_metadata: Mapping[str, object] | None
    steps: int
    tokens: int

    @property
    def title(self) -> str:
        """What people call it: the name of its session, or its id."""
        return self.display_name or self.run_id


@dataclass(frozen=True)
class ListedCheckpoint:
    """A live checkpoint."""

    run_id: str
    kind: str
    name: str
    owner: str
    base_model: str
    created_at: float
    expires_at: float | None
    size_bytes: int
    public: bool
    has_optimizer: bool
    title: str
    """What people call its run."""

    @property
    def checkpoint_id(self) -> str:
        """Kind and name."""
        return f"{self.kind}/{self.name}"

    @property
    def path(self) -> str:
        """The path that clients use."""
        return f"tinker://{self.run_id}/{self.checkpoint_id}"


@dataclass(frozen=True)
class ListedOperation:
    """An operation of a run; without ``finished_at`` it has not ended."""

    request_id: str
    seq_id: int | None
    kind: str
    accepted_at: float
    started_at: float | None = None
    finished_at: float | None = None
    num_tokens: int = 0
    succeeded: bool | None = None


@dataclass(frozen=True)
class WaitingOperations:
    """The unfinished operations of one kind of one run or sampler."""

    owner: str
    target: str
    kind: str
    count: int
    since: float
    request_id: str
    """The one that waits longest."""


@dataclass(frozen=True)
class ListedKey:
    """An API key, without the key itself."""

    key_id: int
    user: str
    name: str
    created_at: float
    revoked_at: float | None


@dataclass(frozen=True)
class RunUsage:
    """What one run has trained and stores."""

    run_id: str
    owner: str
    base_model: str
    title: str
    tokens: int
    num_checkpoints: int
    checkpoint_bytes: int


class Listings:
    """Reads what is listed. Safe on any thread.

    Example:
        >>> listings = Listings(store.reader)
        >>> [run.title for run in listings.runs("ada", RunFilter(text="sft"), limit=20, offset=0)]
        ['sft on captains_log']
    """

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    # ---- runs

    def runs(self, owner: str | None, wanted: RunFilter, limit: int, offset: int) -> Sequence[ListedRun]:
        """Returns a page of runs, last used first."""
        condition, values = _run_condition(owner, wanted)
        rows = self._rows.all(
            f"{_RUNS} WHERE {condition} ORDER BY r.used_at DESC, r.run_id LIMIT ? OFFSET ?",
            (*values, limit, offset),
        )
        return [_listed_run(row) for row in rows]

    def count_runs(self, owner: str | None, wanted: RunFilter) -> int:
        """Returns how many runs :meth:`runs` finds."""
        condition, values = _run_condition(owner, wanted)
        return self._number(
            f"SELECT count(*) FROM runs AS r LEFT JOIN sessions AS s USING (session_id) WHERE {condition}",  # noqa: S608
            values,
        )

    def run(self, owner: str | None, run_id: str) -> ListedRun | None:
        """Returns one run, or None."""
        row = self._rows.one(f"{_RUNS} WHERE r.run_id = ?1 AND (?2 IS NULL OR r.owner = ?2)", (run_id, owner))
        return _listed_run(row) if row is not None else None

    def run_choices(self, owner: str | None, column: str) -> Sequence[str]:
        """Returns the values that a column of the runs has: ``status``, ``base_model`` or ``owner``."""
        assert column in {"status", "base_model", "owner"}
        rows = self._rows.all(
            f"SELECT DISTINCT {column} AS value FROM runs WHERE ?1 IS NULL OR owner = ?1 ORDER BY 1 LIMIT 200",  # noqa: S608
            (owner,),
        )
        return [row["value"] for row in rows]

    def count_runs_by_status(self, owner: str | None) -> Mapping[str, int]:
        """Returns the number of runs by status."""
        rows = self._rows.all(
            "SELECT status, count(*) AS total FROM runs WHERE ?1 IS NULL OR owner = ?1 GROUP BY status",
            (owner,),
        )
        return {row["status"]: row["total"] for row in rows}

    # ---- operations

    def operations(self, run_id: str, limit: int) -> Sequence[ListedOperation]:
        """Returns the newest operations of a run, newest first: those that have not ended, then those that have."""
        pending = self._rows.all(
            "SELECT request_id, seq_id, kind, created_at AS accepted_at FROM futures "
            "WHERE target = ? AND seq_id IS NOT NULL AND status = 'pending' ORDER BY seq_id DESC LIMIT ?",
            (run_id, limit),
        )
        ended = self._rows.all(
            "SELECT request_id, seq_id, kind, accepted_at, started_at, finished_at, num_tokens, succeeded FROM finished "
            "WHERE target = ? ORDER BY number DESC LIMIT ?",
            (run_id, limit),
        )
        found = [ListedOperation(**dict(row)) for row in (*pending, *ended)]
        return found[:limit]

    def waiting(self, owner: str | None, limit: int = 100) -> Sequence[WaitingOperations]:
        """Returns the unfinished operations by user, run or sampler, and kind; those that wait longest first."""
        rows = self._rows.all(
            # With min(), SQLite takes the other columns from the row that has it.
            "SELECT owner, target, kind, count(*) AS count, min(created_at) AS since, request_id FROM futures "
            "WHERE status = 'pending' AND (?1 IS NULL OR owner = ?1) GROUP BY owner, target, kind ORDER BY since LIMIT ?2",
            (owner, limit),
        )
        return [WaitingOperations(**dict(row)) for row in rows]

    # ---- checkpoints

    def checkpoints(
        self,
        owner: str | None,
        now: float,
        limit: int,
        offset: int = 0,
        *,
        run_id: str | None = None,
        or_public: bool = False,
    ) -> Sequence[ListedCheckpoint]:
        """Returns a page of live checkpoints, newest first; ``or_public`` adds those that others have published."""
        rows = self._rows.all(
            "SELECT c.run_id, c.kind, c.name, c.owner, c.base_model, c.created_at, c.expires_at, c.size_bytes, c.public, "  # noqa: S608 -- constants
            "c.has_optimizer, coalesce(s.display_name, c.run_id) AS title FROM checkpoints AS c "
            "LEFT JOIN runs AS r ON r.run_id = c.run_id LEFT JOIN sessions AS s ON s.session_id = r.session_id "
            f"WHERE {_LIVE} ORDER BY c.created_at DESC, c.rowid DESC LIMIT ?5 OFFSET ?6",
            (owner, now, run_id, or_public, limit, offset),
        )
        return [
            ListedCheckpoint(
                **{**dict(row), "public": bool(row["public"]), "has_optimizer": bool(row["has_optimizer"])}
            )
            for row in rows
        ]

    def count_checkpoints(self, owner: str | None, now: float) -> int:
        """Returns the number of live checkpoints."""
        return self._number(f"SELECT count(*) FROM checkpoints AS c WHERE {_LIVE}", (owner, now, None, False))  # noqa: S608

    # ---- keys and usage

    def keys(self, owner: str | None) -> Sequence[ListedKey]:
        """Returns the keys, revoked ones included, oldest first."""
        rows = self._rows.all(
            "SELECT key_id, user_id AS user, name, created_at, revoked_at FROM keys "
            "WHERE ?1 IS NULL OR user_id = ?1 ORDER BY key_id LIMIT 1000",
            (owner,),
        )
        return [ListedKey(**dict(row)) for row in rows]

    def usage(self, owner: str | None, since: float) -> Mapping[str, Mapping[str, int]]:
        """Returns what was used in the hours that start at a time or later: amounts by user and kind."""
        rows = self._rows.all(
            "SELECT owner, kind, sum(amount) AS total FROM usage WHERE hour >= ?2 AND (?1 IS NULL OR owner = ?1) "
            "GROUP BY owner, kind",
            (owner, since),
        )
        found: dict[str, dict[str, int]] = {}
        for row in rows:
            found.setdefault(row["owner"], {})[row["kind"]] = row["total"]
        return found

    def storage(self, owner: str | None) -> Mapping[str, Mapping[str, int]]:
        """Returns the bytes that users store, by user and kind."""
        rows = self._rows.all(
            "SELECT owner, kind, bytes FROM disk_usage WHERE bytes > 0 AND (?1 IS NULL OR owner = ?1) ORDER BY owner",
            (owner,),
        )
        found: dict[str, dict[str, int]] = {}
        for row in rows:
            found.setdefault(row["owner"], {})[row["kind"]] = row["bytes"]
        return found

    def usage_by_run(self, owner: str | None, now: float, limit: int) -> Sequence[RunUsage]:
        """Returns what runs have trained and store; those with the most tokens first."""
        rows = self._rows.all(
            "SELECT r.run_id, r.owner, r.base_model, coalesce(s.display_name, r.run_id) AS title, "
            "coalesce(l.tokens, 0) AS tokens, count(c.name) AS num_checkpoints, "
            "coalesce(sum(c.size_bytes), 0) AS checkpoint_bytes FROM runs AS r LEFT JOIN sessions AS s USING (session_id) "
            "LEFT JOIN loops AS l ON l.run_id = r.run_id "
            "LEFT JOIN checkpoints AS c ON c.run_id = r.run_id AND (c.expires_at IS NULL OR c.expires_at > ?2) "
            "WHERE ?1 IS NULL OR r.owner = ?1 GROUP BY r.run_id ORDER BY tokens DESC, checkpoint_bytes DESC LIMIT ?3",
            (owner, now, limit),
        )
        return [RunUsage(**dict(row)) for row in rows]

    def _number(self, sql: str, values: Sequence[str | float | None]) -> int:
        row = self._rows.one(sql, values)
        return int(row[0]) if row is not None else 0


_RUNS = (
    "SELECT r.*, s.display_name, coalesce(l.step, 0) AS steps, coalesce(l.tokens, 0) AS tokens FROM runs AS r "
    "LEFT JOIN sessions AS s USING (session_id) LEFT JOIN loops AS l ON l.run_id = r.run_id"
)
_LIVE = (
    "(?1 IS NULL OR c.owner = ?1 OR (?4 AND c.public)) AND (c.expires_at IS NULL OR c.expires_at > ?2) "
    "AND (?3 IS NULL OR c.run_id = ?3)"
)


def _run_condition(owner: str | None, wanted: RunFilter) -> tuple[str, Sequence[str]]:
    conditions, values = ["true"], []
    for column, value in (
        ("owner", owner),
        ("owner", wanted.owner),
        ("status", wanted.status),
        ("base_model", wanted.base_model),
    ):
        if value:
            conditions.append(f"r.{column} = ?")
            values.append(value)
    if wanted.text:
        columns = ("r.run_id", "r.base_model", "r.owner", "s.display_name", "r.user_metadata")
        # instr, because % and _ are common in names.
        conditions.append(f"({' OR '.join(f'instr(lower({column}), lower(?))' for column in columns)})")
        values += [wanted.text] * len(columns)
    return " AND ".join(conditions), values


def _listed_run(row: sqlite3.Row) -> ListedRun:
    return ListedRun(
        run_id=row["run_id"],
        session_id=row["session_id"],
        owner=row["owner"],
        base_model=row["base_model"],
        status=row["status"],
        created_at=row["created_at"],
        used_at=row["used_at"],
        display_name=row["display_name"],
        lora=decode_lora(row["lora"]),
        user_metadata=decode_object(row["user_metadata"]),
        steps=row["steps"],
        tokens=row["tokens"],
    )
