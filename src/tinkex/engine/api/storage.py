"""Database errors: the response to the client, and the problem in the engine's health."""

from __future__ import annotations

import logging
import sqlite3
import time

from tinkex.engine.engine import Engine
from tinkex.errors import StorageUnavailable

logger = logging.getLogger("tinkex.engine")

RECORDS = "records"
CORRUPTION = "damage"
RECHECK_INTERVAL_S = 0.2
_CORRUPT = frozenset({"SQLITE_CORRUPT", "SQLITE_NOTADB"})


def is_storage_error(error: sqlite3.Error) -> bool:
    """Returns whether the storage is at fault, and not the statement."""
    return isinstance(error, sqlite3.OperationalError) or type(error) is sqlite3.DatabaseError


class StorageErrors:
    """Records database errors in the engine's health until the database works again."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._next_check = 0.0
        self._failing = False

    def record(self, error: sqlite3.Error) -> StorageUnavailable:
        """Record a problem; returns the error for the client."""
        logger.warning("a request failed: %s", error)
        if (error.sqlite_errorname or "").split("_VTAB", maxsplit=1)[0] in _CORRUPT:
            # Permanent until the server is started on an intact database.
            reason = f"the database is corrupt ({error}); stop the server and restore engine.db from a backup"
            self._engine.health.trouble(CORRUPTION, reason)
            return StorageUnavailable(f"{reason}. Checkpoints are not affected.")
        self._failing = True
        self._engine.health.trouble(RECORDS, f"the database cannot be written ({error})")
        return StorageUnavailable(
            f"the server's database cannot be written ({error}), so nothing was changed. Free disk space or close the program "
            "that locks the database, then try again."
        )

    def recheck(self) -> None:
        """Clear the recorded problem if the database can be written again; rate-limited."""
        now = time.monotonic()
        if self._failing and now >= self._next_check:
            self._next_check = now + RECHECK_INTERVAL_S
            try:
                self._engine.store.database.probe()
            except sqlite3.Error:
                return
            self._failing = False
            self._engine.health.fine(RECORDS)
