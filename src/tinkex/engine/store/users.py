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
"""Owns everything on a server that has one user, with or without a key."""

LOOK_INTERVAL_S = 0.25
"""How long a key that another process has revoked may still be let in."""

KEY_PREFIX = "tml-"
"""Clients refuse keys that start otherwise."""


def new_key() -> str:
    """A fresh API key.

    >>> new_key().startswith("tml-")
    True
    """
    return KEY_PREFIX + secrets.token_urlsafe(24)


@dataclass(frozen=True)
class KeyRow:
    """One key: whose it is and what it is called. The key itself is not known here."""

    key_id: int
    user_id: str
    name: str
    created_at: float
    revoked_at: float | None = None


class Users:
    """Who may use this server. Keys are random, so a plain SHA-256 of them is as strong as they are."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = threading.Lock()
        self._live: Mapping[bytes, KeyRow] = {}
        self._by_id: Mapping[int, KeyRow] = {}
        self._read_at: object = None
        self._changed_at: object = object()
        self._version = -1
        self._look_again = 0.0

    def add_key(self, user_id: str, key: str, now: float, name: str | None = None) -> KeyRow:
        """Let ``key`` act for ``user_id``, who is created if new; a key that exists already stays as it is."""
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
        """A new key of a user, told once: afterwards only its hash is known."""
        key = new_key()
        with self._database.transaction():
            row = self.add_key(user_id, key, now, name)
            self._write_down("key_create", row, now)
        return key, row

    def find_key(self, key: str) -> KeyRow | None:
        """What is known of a key that is in force, or None."""
        # Looked up by hash: how long that takes says nothing about the key.
        hashed = _hash(key)
        return self._in_force().get(hashed) or self._in_force(look=True).get(hashed)

    def find(self, key: str) -> str | None:
        """The user a key belongs to, or None."""
        found = self.find_key(key)
        return found.user_id if found is not None else None

    def key(self, key_id: int) -> KeyRow | None:
        """The key of an id, if it is in force."""
        self._in_force()
        return self._by_id.get(key_id)

    def all_keys(self, user_id: str | None = None) -> Sequence[KeyRow]:
        """All keys, also revoked ones, or those of one user; oldest first."""
        rows = self._database.all(
            "SELECT * FROM keys WHERE ?1 IS NULL OR user_id = ?1 ORDER BY key_id", (user_id,)
        )
        return [_key(row) for row in rows]

    def revoke(self, key_id: int, now: float) -> bool:
        """End a key for good; says whether it was in force."""
        with self._database.transaction() as execute:
            changed = execute(
                "UPDATE keys SET revoked_at = ? WHERE key_id = ? AND revoked_at IS NULL", (now, key_id)
            )
            row = self._database.one("SELECT * FROM keys WHERE key_id = ?", (key_id,))
            if changed and row is not None:
                self._write_down("key_revoke", _key(row), now)
        self._changed()
        return changed > 0

    def _write_down(self, event: str, key: KeyRow, now: float) -> None:
        details = {"user": key.user_id, "key_id": key.key_id, "name": key.name}
        Audit(self._database).add(AuditRow(key.user_id, now, "organizations", event, details=details))

    def _in_force(self, *, look: bool = False) -> Mapping[bytes, KeyRow]:
        """The keys in force; another process may make and revoke some, which is looked for every so often."""
        with self._lock:
            now = time.monotonic()
            if self._read_at is self._changed_at and now < self._look_again and not look:
                return self._live
            self._look_again = now + LOOK_INTERVAL_S
            changed_at, version = self._changed_at, self._database.version()
            if self._read_at is not changed_at or version != self._version:
                self._read_at, self._version = changed_at, version
                rows = self._database.all("SELECT * FROM keys WHERE revoked_at IS NULL")
                self._live = {row["key_hash"]: _key(row) for row in rows}
                self._by_id = {row.key_id: row for row in self._live.values()}
            return self._live

    def _changed(self) -> None:
        # Without the lock: whoever changes keys may hold the database, which readers wait for under the lock.
        self._changed_at = object()


def _key(row: sqlite3.Row) -> KeyRow:
    return KeyRow(row["key_id"], row["user_id"], row["name"], row["created_at"], row["revoked_at"])


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
