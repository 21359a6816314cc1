"""One SQLite database in WAL mode, shared by the threads of one engine."""

from __future__ import annotations

import shutil
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

MAX_IDLE_WAL_BYTES = 16 * 1024 * 1024
"""The write-ahead log is truncated to this size once a larger transaction is in the database file."""
BATCH_ROWS = 256
BATCH_BYTES = 1024 * 1024
"""What is deleted in one transaction at most (or one row): other threads write between two of them."""
FREE_PAGES_KEPT = 1024
"""Free pages that stay in the file: new rows reuse them."""
MAX_COMPACTED_BYTES = 128 * 1024 * 1024
"""A start rewrites a database with at most so much data, which takes about a second."""

INCREMENTAL_VACUUM = "PRAGMA auto_vacuum=INCREMENTAL"
"""In a file with tables it takes effect when the file is rewritten."""


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
            if self._pragma("page_count") == 0:
                self._connection.execute(INCREMENTAL_VACUUM)  # before anything else is written
            for pragma in (
                "journal_mode=WAL",
                "synchronous=NORMAL",
                "foreign_keys=ON",
                f"busy_timeout={BUSY_TIMEOUT_MS}",
                f"journal_size_limit={MAX_IDLE_WAL_BYTES}",
                # Deleted pages are not overwritten with zeros, which would write as much as was deleted.
                "secure_delete=FAST",
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

    @property
    def can_shrink(self) -> bool:
        """Whether free pages can be returned to the file system; false for a file of 0.1 until :meth:`compact`."""
        return self._pragma("auto_vacuum") != 0

    def compact(self) -> None:
        """Rewrite the file without free pages; from then on it can shrink. Needs disk space for a second copy."""
        with self._lock:
            self._connection.execute(INCREMENTAL_VACUUM)
            self._connection.execute("VACUUM")
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def compact_if_small(self) -> bool:
        """Compact a file that cannot shrink if that is quick and there is space; returns whether it can shrink now."""
        if self.can_shrink:
            return True
        used = (self._pragma("page_count") - self._pragma("freelist_count")) * self._pragma("page_size")
        if used > MAX_COMPACTED_BYTES or shutil.disk_usage(self.path.parent).free < 3 * used:
            return False
        try:
            self.compact()
        except sqlite3.OperationalError:
            return False  # another program reads the database: the next start tries again
        return self.can_shrink

    def shrink(self, pages: int = BATCH_ROWS) -> bool:
        """Return free pages to the file system, at most so many; returns whether there are more."""
        with self._lock:
            assert self._depth == 0, "it is a transaction of its own"
            free = self._pragma("freelist_count") - FREE_PAGES_KEPT
            if free <= 0 or not self.can_shrink:
                return False
            # As a script: each step of the statement frees one page, and execute() takes a single step.
            self._connection.executescript(f"PRAGMA incremental_vacuum({min(free, pages)})")
            if free > pages:
                return True
            self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()  # truncates the file
            return False

    def delete_batch(self, table: str, key: str, condition: str, parameters: Parameters) -> int:
        """Delete at most :data:`BATCH_ROWS` rows in one transaction; returns how many, 0 if none are left.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     database = Database(Path(directory) / "engine.db")
        ...     print(database.delete_batch("finished", "number", "finished_at < ?", (9.0,)))
        ...     database.close()
        0
        """
        chosen = f"SELECT {key} FROM {table} WHERE {condition} LIMIT {BATCH_ROWS}"  # noqa: S608 -- constants of the callers
        with self.transaction() as execute:
            return execute(f"DELETE FROM {table} WHERE ({key}) IN ({chosen})", parameters)  # noqa: S608

    def _pragma(self, name: str) -> int:
        with self._lock:
            return int(self._connection.execute(f"PRAGMA {name}").fetchone()[0])

    def flushed(self) -> Future[None]:
        """Returns a future that completes when everything committed so far would survive a power failure."""
        return self._flusher.flushed()

    async def wait_flushed(self) -> None:
        """The same for an event loop."""
        await self._flusher.wait()

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
        return self._pragma("data_version")

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


def first_batch(rows: Sequence[sqlite3.Row]) -> Sequence[sqlite3.Row]:
    """Returns the first rows whose column ``size`` adds up to :data:`BATCH_BYTES` at most, but at least one."""
    total, count = 0, 0
    for row in rows:
        total += row["size"]
        if count and total > BATCH_BYTES:
            break
        count += 1
    return rows[:count]


def _too_large() -> InvalidInput:
    """The error for integers that no column can hold; they come only from callers."""
    return InvalidInput("an integer in this request does not fit into 64 bits.")
