"""A second, read-only connection: long reads of charts and rollouts do not keep the engine from writing."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from tinkex.engine.store.database import Parameters
from tinkex.errors import SetupError

BUSY_TIMEOUT_S = 1.0


class Rows(Protocol):
    """What reads rows: the engine's :class:`Database`, or a :class:`Reader`."""

    def all(self, sql: str, parameters: Parameters = ()) -> Sequence[sqlite3.Row]:
        """Returns all rows of a query."""
        ...

    def one(self, sql: str, parameters: Parameters = ()) -> sqlite3.Row | None:
        """Returns the first row of a query, or None."""
        ...


class Reader:
    """Reads what is committed, also in a data directory that another program holds; opened at the first query. Safe on any thread.

    >>> import tempfile
    >>> from tinkex.engine.store.database import Database
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     database, reader = Database(Path(directory) / "engine.db"), Reader(Path(directory) / "engine.db")
    ...     print(len(reader.all("SELECT user_id FROM users")))
    ...     reader.close()
    ...     database.close()
    0
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._closed = False

    def all(self, sql: str, parameters: Parameters = ()) -> list[sqlite3.Row]:
        """Returns all rows of a query."""
        with self._lock:
            return self._open().execute(sql, parameters).fetchall()

    def one(self, sql: str, parameters: Parameters = ()) -> sqlite3.Row | None:
        """Returns the first row of a query, or None."""
        with self._lock:
            row: sqlite3.Row | None = self._open().execute(sql, parameters).fetchone()
            return row

    def close(self) -> None:
        """Close the connection; later queries fail."""
        with self._lock:
            self._closed = True
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def _open(self) -> sqlite3.Connection:
        if self._closed:
            raise sqlite3.ProgrammingError("the database is closed")
        if self._connection is None:
            try:
                self._connection = sqlite3.connect(
                    f"{self._path.absolute().as_uri()}?mode=ro",
                    uri=True,
                    check_same_thread=False,
                    isolation_level=None,
                    timeout=BUSY_TIMEOUT_S,
                )
            except sqlite3.Error as error:
                raise SetupError(f"{self._path} cannot be read ({error}); check its permissions.") from error
            self._connection.row_factory = sqlite3.Row
        return self._connection
