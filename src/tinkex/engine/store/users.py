"""Users and their API keys; only hashes of the keys are stored."""

from __future__ import annotations

import hashlib
import secrets
import sqlite3
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tinkex.engine.store.audit import Audit, AuditRow
from tinkex.engine.store.database import Database

LOCAL_USER = "local"
"""The owner of everything on a server with a single user, with or without a key."""

KEY_CACHE_TTL_S = 0.25
"""How long a key that another process has revoked may still be accepted."""

KEY_PREFIX = "tml-"
"""Clients reject keys without this prefix."""


def new_key() -> str:
    """Returns a new random API key.

    >>> new_key().startswith("tml-")
    True
    """
    return KEY_PREFIX + secrets.token_urlsafe(24)


@dataclass(frozen=True)
class KeyRow:
    """One API key: its owner and its name, without the key itself."""

    key_id: int
    user_id: str
    name: str
    created_at: float
    revoked_at: float | None = None


class Users:
    """Users and their API keys. Keys are random, so a plain SHA-256 is as strong as they are."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = threading.Lock()
        self._active: Mapping[bytes, KeyRow] = {}
        self._by_id: Mapping[int, KeyRow] = {}
        self._read_at: object = None
        self._changed_at: object = object()
        self._version = -1
        self._cached_until = 0.0

    def add_key(self, user_id: str, key: str, now: float, name: str | None = None) -> KeyRow:
        """Add ``key`` to ``user_id``, which is created if new; an existing key is not changed."""
        with self._database.transaction() as execute:
            execute("INSERT OR IGNORE INTO users (user_id, created_at) VALUES (?, ?)", (user_id, now))
            execute(
                "INSERT OR IGNORE INTO keys (key_hash, user_id, name, created_at) VALUES (?, ?, ?, ?)",
                (_hash(key), user_id, name or user_id, now),
            )
            row = self._database.one("SELECT * FROM keys WHERE key_hash = ?", (_hash(key),))
        self._changed()
        assert row is not None, "the key was just added"
        return _key(row)

    def create_key(self, user_id: str, now: float, name: str | None = None) -> tuple[str, KeyRow]:
        """Create a key for a user; this is the only time it is returned, only its hash is stored."""
        key = new_key()
        with self._database.transaction():
            row = self.add_key(user_id, key, now, name)
            self._add_audit_entry("key_create", row, now)
        return key, row

    def find_key(self, key: str) -> KeyRow | None:
        """Returns the row of an active key, or None."""
        # Looked up by hash, so the timing does not depend on the key.
        hashed = _hash(key)
        return self._active_keys().get(hashed) or self._active_keys(refresh=True).get(hashed)

    def find(self, key: str) -> str | None:
        """Returns the user a key belongs to, or None."""
        found = self.find_key(key)
        return found.user_id if found is not None else None

    def key(self, key_id: int) -> KeyRow | None:
        """Returns the active key with an id, or None."""
        self._active_keys()
        return self._by_id.get(key_id)

    def all_keys(self, user_id: str | None = None) -> Sequence[KeyRow]:
        """Returns all keys, revoked ones included, optionally of one user; oldest first."""
        rows = self._database.all(
            "SELECT * FROM keys WHERE ?1 IS NULL OR user_id = ?1 ORDER BY key_id", (user_id,)
        )
        return [_key(row) for row in rows]

    def revoke(self, key_id: int, now: float) -> bool:
        """Revoke a key; returns whether it was active. The key stays revoked after a power failure."""
        with self._database.transaction() as execute:
            changed = execute(
                "UPDATE keys SET revoked_at = ? WHERE key_id = ? AND revoked_at IS NULL", (now, key_id)
            )
            row = self._database.one("SELECT * FROM keys WHERE key_id = ?", (key_id,))
            if changed and row is not None:
                self._add_audit_entry("key_revoke", _key(row), now)
        self._changed()
        self._database.flushed().result()
        return changed > 0

    def _add_audit_entry(self, event: str, key: KeyRow, now: float) -> None:
        details = {"user": key.user_id, "key_id": key.key_id, "name": key.name}
        Audit(self._database).add(AuditRow(key.user_id, now, "organizations", event, details=details))

    def _active_keys(self, *, refresh: bool = False) -> Mapping[bytes, KeyRow]:
        """Returns the active keys by hash. Another process may change them, so the cache expires quickly."""
        with self._lock:
            now = time.monotonic()
            if self._read_at is self._changed_at and now < self._cached_until and not refresh:
                return self._active
            self._cached_until = now + KEY_CACHE_TTL_S
            changed_at, version = self._changed_at, self._database.data_version()
            if self._read_at is not changed_at or version != self._version:
                self._read_at, self._version = changed_at, version
                rows = self._database.all("SELECT * FROM keys WHERE revoked_at IS NULL")
                self._active = {row["key_hash"]: _key(row) for row in rows}
                self._by_id = {row.key_id: row for row in self._active.values()}
            return self._active

    def _changed(self) -> None:
        # Without the lock: the caller may hold the database lock, which readers wait for under this one.
        self._changed_at = object()


def _key(row: sqlite3.Row) -> KeyRow:
    return KeyRow(row["key_id"], row["user_id"], row["name"], row["created_at"], row["revoked_at"])


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
