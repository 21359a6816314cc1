"""Users and their API keys; only hashes of the keys are stored."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading

from tinkex.engine.store.database import Database

LOCAL_USER = "local"
"""Owns everything on a server that has one user, with or without a key."""

KEY_PREFIX = "tml-"
"""Clients refuse keys that start otherwise."""


def new_key() -> str:
    """A fresh API key.

    >>> new_key().startswith("tml-")
    True
    """
    return KEY_PREFIX + secrets.token_urlsafe(24)


class Users:
    """Who may use this server. Keys are random, so a plain SHA-256 of them is as strong as they are."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = threading.Lock()
        self._keys: list[tuple[bytes, str]] | None = None

    def add_key(self, user_id: str, key: str, now: float) -> None:
        """Let ``key`` act for ``user_id``, who is created if new."""
        with self._database.transaction() as execute:
            execute("INSERT OR IGNORE INTO users (user_id, created_at) VALUES (?, ?)", (user_id, now))
            execute(
                "INSERT OR REPLACE INTO api_keys (key_hash, user_id, created_at) VALUES (?, ?, ?)",
                (_hash(key), user_id, now),
            )
        with self._lock:
            self._keys = None

    def find(self, key: str) -> str | None:
        """The user a key belongs to, or None; takes the same time whatever the key is."""
        with self._lock:
            if self._keys is None:
                rows = self._database.all("SELECT key_hash, user_id FROM api_keys")
                self._keys = [(row["key_hash"], row["user_id"]) for row in rows]
            keys = self._keys
        given, owner = _hash(key), None
        for known, user_id in keys:
            if hmac.compare_digest(known, given):
                owner = user_id
        return owner


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
