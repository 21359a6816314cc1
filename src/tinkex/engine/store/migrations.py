"""The database schema, as numbered steps that are applied once each, in order.

The number of a step is its place in :data:`MIGRATIONS`, counted from 1; SQLite's ``user_version`` is the number of
applied steps. A released step never changes; a schema change is a new step at the end.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Set as AbstractSet
from contextlib import closing
from functools import cache
from pathlib import Path

from tinkex.errors import SetupError


def _counted(table: str, kind: str, size: str, owner: str = "{row}.owner", changed: str = "") -> str:
    """The sum of the sizes of the existing rows by owner, and triggers that keep it: what each user's rows take.

    ``changed`` lists the columns whose updates change the ``size``.
    """

    def add(row: str, amount: str) -> str:
        return (
            f"BEGIN INSERT INTO disk_usage VALUES ({owner.format(row=row)}, '{kind}', {amount}) "  # noqa: S608 -- constants
            "ON CONFLICT DO UPDATE SET bytes = bytes + excluded.bytes; END;"
        )

    before, after = f"({size.format(row='OLD')})", f"({size.format(row='NEW')})"
    triggers = [
        f"CREATE TRIGGER {table}_added AFTER INSERT ON {table} {add('NEW', after)}",
        f"CREATE TRIGGER {table}_deleted AFTER DELETE ON {table} {add('OLD', f'-{before}')}",
    ]
    if changed:
        update = f"CREATE TRIGGER {table}_changed AFTER UPDATE OF {changed} ON {table}"
        triggers.append(f"{update} {add('NEW', f'{after} - {before}')}")
    existing = (
        f"INSERT INTO disk_usage SELECT {owner.format(row=table)}, '{kind}', sum({size.format(row=table)}) "  # noqa: S608 -- constants
        f"FROM {table} WHERE true GROUP BY 1 ON CONFLICT DO UPDATE SET bytes = bytes + excluded.bytes;"
    )
    return " ".join([existing, *triggers])


def _text(*columns: str) -> str:
    """The bytes of text columns."""
    return " + ".join(f"coalesce(length(CAST({{row}}.{column} AS BLOB)), 0)" for column in columns)


def _blob(*columns: str) -> str:
    """The bytes of binary columns, which need not be read."""
    return " + ".join(f"coalesce(length({{row}}.{column}), 0)" for column in columns)


_OWNER_OF_RUN = "coalesce((SELECT owner FROM runs WHERE runs.run_id = {row}.run_id), '')"

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
    """
    -- Unnamed snapshots of samplers; the run of those that 0.1 wrote is not known, their session stands for it.
    CREATE TABLE snapshots (
        directory  TEXT PRIMARY KEY,
        run_id     TEXT NOT NULL,
        owner      TEXT NOT NULL,
        created_at REAL NOT NULL,
        size_bytes INTEGER NOT NULL
    );
    INSERT INTO snapshots SELECT directory, session_id, owner, min(created_at), 0 FROM samplers
        WHERE model_path IS NULL AND directory IS NOT NULL AND released_at IS NULL GROUP BY directory;
    CREATE INDEX snapshots_by_run ON snapshots (run_id, created_at);
    CREATE INDEX samplers_by_directory ON samplers (directory) WHERE model_path IS NULL;
    CREATE INDEX losses_by_session ON custom_losses (session_id);
    CREATE INDEX sessions_by_last_use ON sessions (seen_at);
    -- What each user's rows and files take. Constants stand for the fixed part of a row and its entries in indexes; that of
    -- an operation includes its rows in "turns" and "finished".
    CREATE TABLE disk_usage (
        owner TEXT NOT NULL,
        kind  TEXT NOT NULL,
        bytes INTEGER NOT NULL,
        PRIMARY KEY (owner, kind)
    ) WITHOUT ROWID;
    """,
    "".join(
        (
            _counted("checkpoints", "checkpoints", f"500 + {{row}}.size_bytes + {_text('user_metadata')}"),
            _counted("snapshots", "snapshots", "200 + {row}.size_bytes", changed="size_bytes"),
            _counted("savepoints", "savepoints", "300 + {row}.size_bytes", owner=_OWNER_OF_RUN),
            _counted("assets", "images", "500 + {row}.size_bytes"),
            _counted("journal", "journal", f"400 + {_blob('body')}"),
            _counted("used_numbers", "journal", "100", owner=_OWNER_OF_RUN),
            _counted(
                "futures",
                "results",
                f"600 + {_blob('request', 'result')} + {_text('error')}",
                changed="request, result, error",
            ),
            _counted(
                "sessions",
                "sessions",
                f"400 + {_text('tags', 'user_metadata', 'sdk_version', 'project_id', 'display_name', 'finish_detail')}",
                changed="project_id, finish_detail",
            ),
            _counted("runs", "sessions", f"600 + {_text('user_metadata')}"),
            _counted("samplers", "sessions", "400"),
            _counted("custom_losses", "sessions", f"300 + {_text('name')} + {_blob('definition')}"),
            _counted("audit", "logs", f"300 + {_text('details')}"),
            _counted("usage", "logs", "200"),
            _counted("copies", "logs", f"200 + {_text('idempotency_key')}"),
        )
    ),
    """
    -- Counting live runs and finding sessions that hold something must not read metadata, which is stored before the status.
    CREATE INDEX runs_by_status ON runs (status, owner, session_id);
    CREATE INDEX samplers_in_use ON samplers (session_id) WHERE released_at IS NULL;
    CREATE INDEX audit_by_time ON audit (at);
    """,
    """
    -- Turns that ran before shared none.
    ALTER TABLE turns ADD COLUMN prefix_sharing INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE finished ADD COLUMN tokens_computed INTEGER NOT NULL DEFAULT 0;
    UPDATE finished SET tokens_computed = num_tokens;
    """,
    """
    -- Searches of public checkpoints read them newest first.
    CREATE INDEX checkpoints_by_time ON checkpoints (created_at);
    CREATE TABLE uploads (
        upload_id   TEXT PRIMARY KEY,
        owner       TEXT NOT NULL,
        base_model  TEXT NOT NULL,
        lora        TEXT NOT NULL,
        project_id  TEXT,
        created_at  REAL NOT NULL,
        expires_at  REAL NOT NULL,
        tinker_path TEXT -- once it is finished
    );
    CREATE INDEX uploads_by_owner ON uploads (owner);
    CREATE INDEX uploads_by_expiry ON uploads (expires_at);
    CREATE TABLE upload_files (
        upload_id      TEXT NOT NULL REFERENCES uploads (upload_id),
        name           TEXT NOT NULL,
        owner          TEXT NOT NULL,
        received_bytes INTEGER NOT NULL, -- flushed to disk
        total_bytes    INTEGER,
        reserved_bytes INTEGER NOT NULL, -- what it counts for: never less than what is on disk
        PRIMARY KEY (upload_id, name)
    ) WITHOUT ROWID;
    """
    + _counted("uploads", "uploads", f"500 + {_text('base_model', 'project_id')}")
    + _counted("upload_files", "uploads", "200 + {row}.reserved_bytes", changed="reserved_bytes"),
    """
    CREATE TABLE crashes (
        kind        TEXT NOT NULL, -- loss or user
        name        TEXT NOT NULL,
        num_crashes INTEGER NOT NULL,
        reason      TEXT NOT NULL,
        crashed_at  REAL NOT NULL,
        expires_at  REAL NOT NULL,
        PRIMARY KEY (kind, name)
    ) WITHOUT ROWID;
    """,
    """
    ALTER TABLE runs ADD COLUMN lane TEXT; -- the trainer that holds it
    """,
    """
    -- How far the loop of a run is, and what its metrics take; the tokens and the time since its last optimizer step are pending.
    CREATE TABLE loops (
        run_id       TEXT PRIMARY KEY,
        owner        TEXT NOT NULL,
        step         INTEGER NOT NULL,
        tokens       INTEGER NOT NULL,
        stepped_at   REAL,
        num_values   INTEGER NOT NULL,
        metric_bytes INTEGER NOT NULL,
        pending      BLOB NOT NULL
    );
    CREATE INDEX loops_by_owner ON loops (owner);
    CREATE TABLE metrics (
        metric_id INTEGER PRIMARY KEY,
        run_id    TEXT NOT NULL,
        source    TEXT NOT NULL, -- automatic or logged
        name      TEXT NOT NULL,
        UNIQUE (run_id, source, name)
    );
    CREATE TABLE metric_values (
        metric_id INTEGER NOT NULL,
        step      INTEGER NOT NULL,
        value     REAL, -- NULL if it is not finite
        at        REAL NOT NULL,
        tokens    INTEGER NOT NULL,
        PRIMARY KEY (metric_id, step)
    ) WITHOUT ROWID;
    CREATE TABLE rollouts (
        run_id     TEXT NOT NULL,
        step       INTEGER NOT NULL,
        place      INTEGER NOT NULL,
        owner      TEXT NOT NULL,
        at         REAL NOT NULL,
        reward     REAL,
        advantage  REAL,
        num_tokens INTEGER NOT NULL,
        size_bytes INTEGER NOT NULL,
        content    BLOB NOT NULL,
        PRIMARY KEY (run_id, step, place)
    );
    -- Histograms and lists of steps are read from this index alone, without the contents.
    CREATE INDEX rollouts_by_reward ON rollouts (run_id, step, reward, advantage, num_tokens, size_bytes, at);
    CREATE INDEX rollouts_by_owner ON rollouts (owner, at, size_bytes);
    """
    + _counted(
        "loops",
        "metrics",
        f"300 + {{row}}.metric_bytes + {_blob('pending')}",
        changed="metric_bytes, pending",
    )
    + _counted("rollouts", "rollouts", "{row}.size_bytes", changed="size_bytes"),
    """
    ALTER TABLE samplers ADD COLUMN inflight_run_id TEXT; -- the run whose newest inflight weights it samples from
    CREATE INDEX samplers_by_inflight_run ON samplers (inflight_run_id) WHERE inflight_run_id IS NOT NULL;
    """,
    """
    -- Passes that ran before were not cut.
    ALTER TABLE turns ADD COLUMN num_shards INTEGER NOT NULL DEFAULT 1;
    ALTER TABLE turns ADD COLUMN shard_threads INTEGER NOT NULL DEFAULT 0;
    """,
)


def migrate(connection: sqlite3.Connection, path: Path) -> None:
    """Migrate a database to the newest schema; reject one that a newer engine has written."""
    applied = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if applied < 0 or (applied == 0 and _objects(connection)):
        raise _foreign(path, f"it has tables, and schema version {applied}")
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
    missing = _expected() - _objects(connection)
    if missing:
        raise _foreign(path, f"it lacks {min(missing)}")


@cache
def _expected() -> AbstractSet[str]:
    """What the newest schema consists of."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        for step in MIGRATIONS:
            connection.executescript(step)
        return _objects(connection)


def _objects(connection: sqlite3.Connection) -> AbstractSet[str]:
    """The names of all tables with their columns, indexes and triggers."""
    names = connection.execute("SELECT type || ' ' || name FROM sqlite_master")
    columns = connection.execute(
        "SELECT 'column ' || owner.name || '.' || field.name FROM sqlite_master AS owner "
        "JOIN pragma_table_info(owner.name) AS field WHERE owner.type = 'table'"
    )
    return {name for (name,) in [*names, *columns]}


def _foreign(path: Path, reason: str) -> SetupError:
    return SetupError(
        f"{path} is not a database of the engine, or was changed by another program ({reason}); restore it from a backup, or "
        "start with another data directory (--data-dir)."
    )
