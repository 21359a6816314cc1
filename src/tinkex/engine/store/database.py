"""One SQLite database in WAL mode, shared by the threads of one engine."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

from tinkex.engine.store.flushing import Flusher, flush_path
from tinkex.engine.store.migrations import migrate
from tinkex.errors import InvalidInput, SetupError

Parameters = Sequence[str | bytes | int | float | None]

BUSY_TIMEOUT_MS = 1000
"""Only this engine writes to the database. If another process holds the lock, callers get an error soon."""
CONTENDED_BUSY_TIMEOUT_MS = 20
"""Used after a timeout until a transaction succeeds: the waiting thread blocks all others."""


class Database:
    """Runs statements for any thread, one at a time; a transaction is committed when its block ends.

    WAL with ``synchronous=NORMAL``: a committed transaction survives a crash of the process. To survive a power failure as
    well, wait for :meth:`flushed`; concurrent transactions share one flush.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     database = Database(Path(directory) / "engine.db")
    ...     with database.transaction() as execute:
    ...         _ = execute("INSERT INTO users VALUES (?, ?)", ("ada", 0.0))
    ...     print(database.all("SELECT user_id FROM users")[0]["user_id"])
    ...     database.close()
    ada
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.RLock()
        self._depth = 0
        self._busy_timeout_ms = BUSY_TIMEOUT_MS
        # Autocommit mode: only transaction() opens transactions, never the driver.
        self._connection = sqlite3.connect(
            path, check_same_thread=False, isolation_level=None, cached_statements=256
        )
        self._connection.row_factory = sqlite3.Row
        try:
            for pragma in (
                "journal_mode=WAL",
                "synchronous=NORMAL",
                "foreign_keys=ON",
                f"busy_timeout={BUSY_TIMEOUT_MS}",
            ):
                self._connection.execute(f"PRAGMA {pragma}")
            migrate(self._connection, path)
            self._flusher = Flusher(path.with_name(f"{path.name}-wal"))
            flush_path(path.parent)
        except sqlite3.Error as error:
            self._connection.close()
            raise SetupError(
                f"the engine data in {path.parent} cannot be opened ({error}). If another program has {path.name} open, close "
                "it; if the file is corrupt, restore it from a backup, or start with another data directory (--data-dir)."
            ) from error
        except BaseException:
            self._connection.close()
            raise

    @contextmanager
    def transaction(self) -> Iterator[Execute]:
        """Run the statements of the block atomically; a nested block joins the outer transaction."""
        with self._lock:
            if self._depth == 0:
                self._begin()
            self._depth += 1
            try:
                yield Execute(self._connection)
                if self._depth == 1:
                    self._connection.execute("COMMIT")
            except BaseException:
                # SQLite rolls back by itself when the disk is full.
                if self._depth == 1 and self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise
            finally:
                self._depth -= 1

    def probe(self) -> None:
        """Commit a write that changes nothing; raises ``sqlite3.Error`` if the database cannot be written."""
        with self.transaction() as execute:
            version = self._connection.execute("PRAGMA user_version").fetchone()[0]
            execute(f"PRAGMA user_version = {version}")

    def _begin(self) -> None:
        try:
            self._connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            self._set_busy_timeout(CONTENDED_BUSY_TIMEOUT_MS)
            raise
        self._set_busy_timeout(BUSY_TIMEOUT_MS)

    def _set_busy_timeout(self, milliseconds: int) -> None:
        if milliseconds != self._busy_timeout_ms:
            self._busy_timeout_ms = milliseconds
            self._connection.execute(f"PRAGMA busy_timeout={milliseconds}")

    def check(self, timeout_s: float = 1.0) -> None:
        """Raise :class:`SetupError` if a page of the file is corrupt. Stops after ``timeout_s`` if the file is large."""
        # A separate connection: the scan would evict everything else from the page cache.
        connection = sqlite3.connect(self.path, isolation_level=None)
        deadline = time.monotonic() + timeout_s
        connection.set_progress_handler(lambda: time.monotonic() > deadline, 10_000)
        try:
            found = [row[0] for row in connection.execute("PRAGMA quick_check(1)")]
        except sqlite3.OperationalError:
            return  # timed out, or locked by another program: corruption is detected when the page is read
        except sqlite3.DatabaseError as error:
            found = [str(error)]
        finally:
            connection.close()
        if found != ["ok"]:
            raise SetupError(
                f"the engine data in {self.path.parent} is corrupt ({' '.join(found[0].split())}); restore {self.path.name} from a backup, "
                "or start with another data directory (--data-dir). Nothing was changed."
            )

    def flushed(self) -> Future[None]:
        """Returns a future that completes when everything committed so far would survive a power failure."""
        return self._flusher.flushed()

    @property
    def flush_failure(self) -> OSError | None:
        """Why flushing fails, or None if it works."""
        return self._flusher.failure

    def all(self, sql: str, parameters: Parameters = ()) -> list[sqlite3.Row]:
        """Returns all rows of a query."""
        with self._lock:
            try:
                return self._connection.execute(sql, parameters).fetchall()
            except OverflowError as error:
                raise _too_large() from error

    def one(self, sql: str, parameters: Parameters = ()) -> sqlite3.Row | None:
        """Returns the first row of a query, or None."""
        with self._lock:
            try:
                row: sqlite3.Row | None = self._connection.execute(sql, parameters).fetchone()
            except OverflowError as error:
                raise _too_large() from error
            return row

    @contextmanager
    def exclusive(self) -> Iterator[bool]:
        """Lock the database for the block; yields whether reads in it see only committed data."""
        with self._lock:
            yield self._depth == 0

    def data_version(self) -> int:
        """Returns a number that changes when another process commits."""
        with self._lock:
            return int(self._connection.execute("PRAGMA data_version").fetchone()[0])

    def close(self) -> None:
        """Checkpoint the write-ahead log and close the database."""
        self._flusher.close()
        with self._lock:
            self._connection.close()


class Execute:
    """Runs one statement of a transaction; returns the number of changed rows."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def __call__(self, sql: str, parameters: Parameters = ()) -> int:
        """Run ``sql`` once."""
        try:
            return self._connection.execute(sql, parameters).rowcount
        except OverflowError as error:
            raise _too_large() from error

    def many(self, sql: str, parameters: Sequence[Parameters]) -> int:
        """Run ``sql`` once per set of parameters."""
        try:
            return self._connection.executemany(sql, parameters).rowcount
        except OverflowError as error:
            raise _too_large() from error


def _too_large() -> InvalidInput:
    """The error for integers that no column can hold; they come only from callers."""
    return InvalidInput("an integer in this request does not fit into 64 bits.")
