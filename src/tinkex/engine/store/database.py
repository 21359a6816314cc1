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

PATIENCE_MS = 1000
"""Only this engine writes here; whoever else holds the lock is a guest, and callers are told rather than held up."""
IMPATIENCE_MS = 20
"""The same as long as the guest does not go: everybody else waits behind whoever waits for it."""


class Database:
    """Runs statements for any thread, one at a time; a transaction is committed when its block ends.

    WAL with ``synchronous=NORMAL``: a committed transaction survives the death of the process at any moment. What must
    survive a power failure as well waits for :meth:`flushed`, which many transactions share.

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
        self._patience_ms = PATIENCE_MS
        # Autocommit mode: transactions are opened by transaction() alone, never implicitly by the driver.
        self._connection = sqlite3.connect(
            path, check_same_thread=False, isolation_level=None, cached_statements=256
        )
        self._connection.row_factory = sqlite3.Row
        try:
            for pragma in (
                "journal_mode=WAL",
                "synchronous=NORMAL",
                "foreign_keys=ON",
                f"busy_timeout={PATIENCE_MS}",
            ):
                self._connection.execute(f"PRAGMA {pragma}")
            migrate(self._connection, path)
            self._flusher = Flusher(path.with_name(f"{path.name}-wal"))
            flush_path(path.parent)
        except sqlite3.Error as error:
            self._connection.close()
            raise SetupError(
                f"the engine data in {path.parent} cannot be opened ({error}). If another program has {path.name} open, close "
                "it; if the file is damaged, restore it from a backup, or start with another data directory (--data-dir)."
            ) from error
        except BaseException:
            self._connection.close()
            raise

    @contextmanager
    def transaction(self) -> Iterator[Execute]:
        """All statements of the block, or none of them; a block inside a block joins the outer one."""
        with self._lock:
            if self._depth == 0:
                self._begin()
            self._depth += 1
            try:
                yield Execute(self._connection)
                if self._depth == 1:
                    self._connection.execute("COMMIT")
            except BaseException:
                # A full disk ends the transaction by itself.
                if self._depth == 1 and self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise
            finally:
                self._depth -= 1

    def probe(self) -> None:
        """Write something that changes nothing; raises what keeps others from writing."""
        with self.transaction() as execute:
            version = self._connection.execute("PRAGMA user_version").fetchone()[0]
            execute(f"PRAGMA user_version = {version}")

    def _begin(self) -> None:
        try:
            self._connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            self._wait_at_most(IMPATIENCE_MS)
            raise
        self._wait_at_most(PATIENCE_MS)

    def _wait_at_most(self, milliseconds: int) -> None:
        if milliseconds != self._patience_ms:
            self._patience_ms = milliseconds
            self._connection.execute(f"PRAGMA busy_timeout={milliseconds}")

    def check(self, patience_s: float = 1.0) -> None:
        """Raise :class:`SetupError` if a page of the file is damaged; a large one is looked through as far as time allows."""
        # A connection of its own: what it reads would push everything else out of the cache.
        connection = sqlite3.connect(self.path, isolation_level=None)
        deadline = time.monotonic() + patience_s
        connection.set_progress_handler(lambda: time.monotonic() > deadline, 10_000)
        try:
            found = [row[0] for row in connection.execute("PRAGMA quick_check(1)")]
        except sqlite3.OperationalError:
            return  # the time is over, or another program has it: what is damaged is found when it is needed
        except sqlite3.DatabaseError as error:
            found = [str(error)]
        finally:
            connection.close()
        if found != ["ok"]:
            raise SetupError(
                f"the engine data in {self.path.parent} is damaged ({' '.join(found[0].split())}); restore {self.path.name} from a backup, "
                "or start with another data directory (--data-dir). Nothing was changed."
            )

    def flushed(self) -> Future[None]:
        """Done when everything committed so far would survive a power failure."""
        return self._flusher.flushed()

    @property
    def flush_failure(self) -> OSError | None:
        """Why the disk does not take commits any more, if it does not."""
        return self._flusher.failure

    def all(self, sql: str, parameters: Parameters = ()) -> list[sqlite3.Row]:
        """Every row a query gives."""
        with self._lock:
            try:
                return self._connection.execute(sql, parameters).fetchall()
            except OverflowError as error:
                raise _too_large() from error

    def one(self, sql: str, parameters: Parameters = ()) -> sqlite3.Row | None:
        """The first row a query gives, or None."""
        with self._lock:
            try:
                row: sqlite3.Row | None = self._connection.execute(sql, parameters).fetchone()
            except OverflowError as error:
                raise _too_large() from error
            return row

    @contextmanager
    def alone(self) -> Iterator[bool]:
        """Keeps everybody else from the database for the block; says whether what is read there is committed."""
        with self._lock:
            yield self._depth == 0

    def version(self) -> int:
        """A number that changes when another process has committed something."""
        with self._lock:
            return int(self._connection.execute("PRAGMA data_version").fetchone()[0])

    def close(self) -> None:
        """Write everything into the main file and close it."""
        self._flusher.close()
        with self._lock:
            self._connection.close()


class Execute:
    """Runs one statement of a transaction and says how many rows it changed."""

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
    """The refusal of whole numbers that no column holds; only a caller can have made one up."""
    return InvalidInput("a number of this call needs more than 64 bits; none that is used does.")
