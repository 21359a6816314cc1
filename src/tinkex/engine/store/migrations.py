"""The database schema, as numbered steps that are applied once each, in order.

The number of a step is its place in :data:`MIGRATIONS`, counted from 1; SQLite's ``user_version`` is the number of
applied steps. A released step never changes; a schema change is a new step at the end.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from tinkex.errors import SetupError

MIGRATIONS: tuple[str, ...] = (
    """
    CREATE TABLE users (
        user_id    TEXT PRIMARY KEY,
        created_at REAL NOT NULL
    );
    CREATE TABLE api_keys (
        key_hash   BLOB PRIMARY KEY,
        user_id    TEXT NOT NULL REFERENCES users (user_id),
        created_at REAL NOT NULL
    );
    CREATE TABLE sessions (
        session_id    TEXT PRIMARY KEY,
        owner         TEXT NOT NULL,
        created_at    REAL NOT NULL,
        seen_at       REAL NOT NULL,
        tags          TEXT NOT NULL,
        user_metadata TEXT NOT NULL,
        sdk_version   TEXT NOT NULL,
        project_id    TEXT,
        display_name  TEXT,
        finished_at   REAL,
        finish_reason TEXT,
        finish_detail TEXT
    );
    CREATE INDEX sessions_by_owner ON sessions (owner, created_at);
    CREATE TABLE runs (
        run_id           TEXT PRIMARY KEY,
        session_id       TEXT NOT NULL REFERENCES sessions (session_id),
        owner            TEXT NOT NULL,
        base_model       TEXT NOT NULL,
        lora             TEXT,
        optimizer_config TEXT,
        user_metadata    TEXT,
        created_at       REAL NOT NULL,
        used_at          REAL NOT NULL,
        status           TEXT NOT NULL
    );
    CREATE INDEX runs_by_owner ON runs (owner, used_at);
    CREATE INDEX runs_by_session ON runs (session_id);
    CREATE TABLE futures (
        request_id   TEXT PRIMARY KEY,
        owner        TEXT NOT NULL,
        kind         TEXT NOT NULL,
        target       TEXT NOT NULL,
        seq_id       INTEGER,
        payload_hash BLOB NOT NULL,
        status       TEXT NOT NULL,
        format       TEXT,
        category     TEXT,
        created_at   REAL NOT NULL,
        finished_at  REAL,
        fetched_at   REAL,
        -- Large columns last: reading the small ones then never walks through them.
        error        TEXT,
        request      BLOB,
        result       BLOB
    );
    CREATE UNIQUE INDEX futures_by_turn ON futures (target, seq_id) WHERE seq_id IS NOT NULL;
    CREATE INDEX futures_by_finish ON futures (status, finished_at);
    CREATE INDEX futures_by_fetch ON futures (status, fetched_at);
    CREATE TABLE checkpoints (
        run_id           TEXT NOT NULL,
        kind             TEXT NOT NULL,
        name             TEXT NOT NULL,
        owner            TEXT NOT NULL,
        base_model       TEXT NOT NULL,
        lora             TEXT NOT NULL,
        optimizer_config TEXT,
        has_optimizer    INTEGER NOT NULL,
        created_at       REAL NOT NULL,
        expires_at       REAL,
        size_bytes       INTEGER NOT NULL,
        public           INTEGER NOT NULL,
        user_metadata    TEXT,
        directory        TEXT NOT NULL,
        PRIMARY KEY (run_id, kind, name)
    );
    CREATE INDEX checkpoints_by_owner ON checkpoints (owner, created_at);
    CREATE TABLE samplers (
        sampler_id  TEXT PRIMARY KEY,
        session_id  TEXT NOT NULL REFERENCES sessions (session_id),
        owner       TEXT NOT NULL,
        base_model  TEXT NOT NULL,
        model_path  TEXT,
        directory   TEXT,
        created_at  REAL NOT NULL,
        released_at REAL
    );
    CREATE INDEX samplers_by_session ON samplers (session_id);
    """,
    """
    CREATE TABLE journal (
        request_id TEXT PRIMARY KEY,
        run_id     TEXT NOT NULL,
        seq_id     INTEGER NOT NULL,
        owner      TEXT NOT NULL,
        kind       TEXT NOT NULL,
        num_tokens INTEGER NOT NULL,
        digest     BLOB NOT NULL,
        body       BLOB NOT NULL
    );
    CREATE INDEX journal_by_run ON journal (run_id, seq_id);
    -- A table of its own: noting a turn must not rewrite the request's body.
    CREATE TABLE turns (
        turn       INTEGER NOT NULL,
        place      INTEGER NOT NULL,
        run_id     TEXT NOT NULL,
        seq_id     INTEGER NOT NULL,
        request_id TEXT NOT NULL,
        succeeded  INTEGER NOT NULL,
        PRIMARY KEY (turn, place)
    ) WITHOUT ROWID;
    CREATE INDEX turns_by_run ON turns (run_id, turn);
    CREATE TABLE used_numbers (
        run_id    TEXT NOT NULL,
        seq_id    INTEGER NOT NULL,
        and_below INTEGER NOT NULL, -- whether all lower numbers are used up as well
        PRIMARY KEY (run_id, seq_id)
    ) WITHOUT ROWID;
    CREATE TABLE savepoints (
        run_id     TEXT PRIMARY KEY,
        turn       INTEGER NOT NULL,
        next_seq   INTEGER NOT NULL,
        file       TEXT NOT NULL,
        size_bytes INTEGER NOT NULL,
        digest     BLOB NOT NULL
    );
    """,
    """
    -- What has ended, in the order in which it did: pollers go on from a number, and a session's trace is drawn from it.
    CREATE TABLE finished (
        number      INTEGER PRIMARY KEY AUTOINCREMENT,
        request_id  TEXT NOT NULL,
        target      TEXT NOT NULL,
        seq_id      INTEGER,
        kind        TEXT NOT NULL,
        accepted_at REAL NOT NULL,
        started_at  REAL,
        finished_at REAL NOT NULL,
        num_tokens  INTEGER NOT NULL,
        num_bytes   INTEGER NOT NULL,
        succeeded   INTEGER NOT NULL
    );
    CREATE INDEX finished_by_target ON finished (target, number);
    CREATE INDEX finished_by_time ON finished (finished_at);
    ALTER TABLE samplers ADD COLUMN num_clients INTEGER NOT NULL DEFAULT 0;
    CREATE TABLE custom_losses (
        loss_id    TEXT PRIMARY KEY,
        session_id TEXT NOT NULL REFERENCES sessions (session_id),
        owner      TEXT NOT NULL,
        name       TEXT NOT NULL,
        created_at REAL NOT NULL,
        definition BLOB NOT NULL
    );
    CREATE TABLE keys (
        key_id     INTEGER PRIMARY KEY AUTOINCREMENT,
        key_hash   BLOB NOT NULL UNIQUE,
        user_id    TEXT NOT NULL REFERENCES users (user_id),
        name       TEXT NOT NULL,
        created_at REAL NOT NULL,
        revoked_at REAL
    );
    INSERT INTO keys (key_hash, user_id, name, created_at)
        SELECT key_hash, user_id, user_id, created_at FROM api_keys ORDER BY created_at;
    DROP TABLE api_keys;
    CREATE TABLE copies (
        owner           TEXT NOT NULL,
        idempotency_key TEXT NOT NULL,
        tinker_path     TEXT NOT NULL,
        created_at      REAL NOT NULL,
        PRIMARY KEY (owner, idempotency_key)
    ) WITHOUT ROWID;
    CREATE TABLE audit (
        number      INTEGER PRIMARY KEY,
        owner       TEXT NOT NULL,
        at          REAL NOT NULL,
        category    TEXT NOT NULL,
        event       TEXT NOT NULL,
        model_id    TEXT,
        tinker_path TEXT,
        details     TEXT NOT NULL
    );
    CREATE INDEX audit_by_owner ON audit (owner, at);
    CREATE TABLE usage (
        hour       INTEGER NOT NULL,
        owner      TEXT NOT NULL,
        session_id TEXT NOT NULL,
        base_model TEXT NOT NULL,
        kind       TEXT NOT NULL,
        amount     INTEGER NOT NULL,
        PRIMARY KEY (hour, owner, session_id, base_model, kind)
    ) WITHOUT ROWID;
    """,
    """
    CREATE TABLE assets (
        owner      TEXT NOT NULL,
        asset_id   TEXT NOT NULL,
        name       TEXT NOT NULL,
        format     TEXT NOT NULL,
        size_bytes INTEGER NOT NULL,
        sha256     TEXT NOT NULL,
        file       TEXT NOT NULL,
        created_at REAL NOT NULL,
        expires_at REAL NOT NULL,
        PRIMARY KEY (owner, asset_id)
    );
    CREATE INDEX assets_by_time ON assets (owner, created_at);
    """,
)


def migrate(connection: sqlite3.Connection, path: Path) -> None:
    """Migrate a database to the newest schema; reject one that a newer engine has written."""
    applied = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if applied > len(MIGRATIONS):
        raise SetupError(
            f"the engine data in {path.parent} was written by a newer version of tinkex (schema {applied}; this version "
            f"supports up to {len(MIGRATIONS)}); upgrade tinkex, or start with another data directory (--data-dir)."
        )
    for number in range(applied + 1, len(MIGRATIONS) + 1):
        # One transaction per step: a crash leaves the previous schema.
        connection.executescript(
            f"BEGIN IMMEDIATE; {MIGRATIONS[number - 1]} PRAGMA user_version = {number}; COMMIT;"
        )
