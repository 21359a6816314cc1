"""What callers are told when the database cannot be read or written, and what health says about it."""

from __future__ import annotations

import logging
import sqlite3
import time

from tinkex.engine.engine import Engine
from tinkex.errors import StorageUnavailable

logger = logging.getLogger("tinkex.engine")

RECORDS = "records"
DAMAGE = "damage"
LOOK_AGAIN_S = 0.2
_DAMAGED = frozenset({"SQLITE_CORRUPT", "SQLITE_NOTADB"})


def is_trouble(error: sqlite3.Error) -> bool:
    """Whether storage is at fault, and not a statement of ours."""
    return isinstance(error, sqlite3.OperationalError) or type(error) is sqlite3.DatabaseError


class StorageTrouble:
    """Notes in the health of an engine what keeps calls from being answered, until it has gone."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._look_again = 0.0
        self._noted = False

    def refusal(self, error: sqlite3.Error) -> StorageUnavailable:
        """The refusal of a call whose records could not be read or written."""
        logger.warning("a call was refused: %s", error)
        if (error.sqlite_errorname or "").split("_VTAB", maxsplit=1)[0] in _DAMAGED:
            # It does not go away by itself: it stays noted until the server is started on sound data.
            reason = f"the database is damaged ({error}); stop the server and restore engine.db from a backup"
            self._engine.health.trouble(DAMAGE, reason)
            return StorageUnavailable(f"{reason}. Checkpoints are not affected.")
        self._noted = True
        self._engine.health.trouble(RECORDS, f"nothing can be recorded ({error})")
        return StorageUnavailable(
            f"the server cannot record anything now ({error}), so nothing was changed. Free disk space or close what holds its "
            "database, then try again."
        )

    def look_again(self) -> None:
        """Take back what was noted if writing works again; looked for, but not too often."""
        now = time.monotonic()
        if self._noted and now >= self._look_again:
            self._look_again = now + LOOK_AGAIN_S
            try:
                self._engine.store.database.probe()
            except sqlite3.Error:
                return
            self._noted = False
            self._engine.health.fine(RECORDS)
