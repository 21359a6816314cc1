"""The engine's persistent state, in one data directory that one engine uses at a time."""

from __future__ import annotations

import logging
import os
import secrets
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Self

from tinkex.engine.store.assets import Assets
from tinkex.engine.store.audit import Audit
from tinkex.engine.store.checkpoints import Checkpoints
from tinkex.engine.store.copies import Copies
from tinkex.engine.store.crashes import Crashes
from tinkex.engine.store.database import Database
from tinkex.engine.store.directories import Directories
from tinkex.engine.store.disk_usage import DiskUsage
from tinkex.engine.store.finished import Finished
from tinkex.engine.store.futures import Futures
from tinkex.engine.store.journal import Journal
from tinkex.engine.store.lock import LOCK_FILE, DirectoryLock
from tinkex.engine.store.loop_metrics import LoopMetrics
from tinkex.engine.store.losses import Losses
from tinkex.engine.store.permissions import create_private, make_private
from tinkex.engine.store.reading import Reader
from tinkex.engine.store.rollouts import Rollouts
from tinkex.engine.store.run_changes import RunChanges
from tinkex.engine.store.runs import Runs
from tinkex.engine.store.samplers import Samplers
from tinkex.engine.store.savepoints import Savepoints
from tinkex.engine.store.sessions import Sessions
from tinkex.engine.store.uploads import Uploads
from tinkex.engine.store.usage import Usage
from tinkex.engine.store.users import LOCAL_USER, Users, new_key
from tinkex.errors import SetupError

logger = logging.getLogger("tinkex.engine")

DATABASE_FILE = "engine.db"
KEY_FILE = "api_key"
SIGNING_KEY_FILE = "signing_key"
PRIVATE_FILES = (DATABASE_FILE, f"{DATABASE_FILE}-wal", f"{DATABASE_FILE}-shm", KEY_FILE, SIGNING_KEY_FILE)


class Store:
    """Opens a data directory, creating what is missing. Safe on any thread.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory, Store(Path(directory)) as store:
    ...     store.users.find(store.local_key(now=0.0))
    'local'
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_no_foreign_files(root)
            self._lock = DirectoryLock(root)
            create_private(root / DATABASE_FILE)
            make_private([root, *(root / name for name in PRIVATE_FILES)])
        except OSError as error:
            raise SetupError(
                f"cannot write to the data directory {root} ({error.strerror}); choose another with --data-dir, "
                "or set TINKEX_HOME."
            ) from error
        try:
            self.database = Database(root / DATABASE_FILE)
        except BaseException:
            self._lock.release()
            raise
        self.reader = Reader(self.database.path)
        """Reads beside the engine's own connection; for queries that take long."""
        try:
            self.database.check()
            self.database.probe()
            if not self.database.compact_if_small():
                logger.warning(
                    "%s was written by tinkex 0.1 and cannot shrink; stop the server and run: tinkex doctor --compact",
                    self.database.path,
                )
        except sqlite3.Error as error:
            self.close()
            raise SetupError(
                f"the engine data in {root} cannot be written ({error}). Free disk space, or close the program that locks "
                f"{DATABASE_FILE}, then start again; nothing was changed."
            ) from error
        except BaseException:
            self.close()
            raise
        self.users = Users(self.database)
        self.sessions = Sessions(self.database)
        self.runs = Runs(self.database)
        self.futures = Futures(self.database)
        self.checkpoints = Checkpoints(self.database)
        self.finished = Finished(self.database)
        self.copies = Copies(self.database, self.checkpoints)
        self.samplers = Samplers(self.database)
        self.losses = Losses(self.database)
        self.crashes = Crashes(self.database)
        self.assets = Assets(self.database)
        self.uploads = Uploads(self.database)
        self.audit = Audit(self.database)
        self.usage = Usage(self.database)
        self.journal = Journal(self.database)
        self.savepoints = Savepoints(self.database)
        self.directories = Directories(root)
        self.disk_usage = DiskUsage(self.database)
        self.run_changes = RunChanges()
        """Who follows the metrics and rollouts of runs."""
        self.loop_metrics = LoopMetrics(self.database, self.reader, self.run_changes)
        self.rollouts = Rollouts(self.database, self.reader, self.run_changes)
        for directory in self.samplers.unmeasured_snapshots():
            self.samplers.set_size(directory, self.directories.size(directory) or 1)

    def local_key(self, now: float) -> str:
        """Returns the API key of the server's own user: created at the first start, in a file only its owner can read."""
        file = self.root / KEY_FILE
        key = _secret(file, new_key)
        if self.users.add_key(LOCAL_USER, key, now).revoked_at is not None:
            file.unlink()
            return self.local_key(now)
        return key

    @cached_property
    def signing_key(self) -> bytes:
        """The secret this server signs tokens with: created at first use, in a file only its owner can read."""
        return _secret(self.root / SIGNING_KEY_FILE, lambda: secrets.token_hex(32)).encode("ascii")

    def close(self) -> None:
        """Close the database and release the directory lock."""
        self.reader.close()
        self.database.close()
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextmanager
def open_users(root: Path) -> Iterator[Users]:
    """Open the users and keys of a data directory, also while a server uses it; the server notices changes immediately.

    Example:
        >>> with open_users(config.engine_dir) as users:
        ...     key, row = users.create_key("ada", time.time(), "laptop")
    """
    if not (root / DATABASE_FILE).is_file():
        raise SetupError(
            f"{root} contains no engine data; start a server on it once with tinkex serve, or choose another with --data-dir."
        )
    database = Database(root / DATABASE_FILE)
    try:
        yield Users(database)
    finally:
        database.close()


@contextmanager
def open_reader(root: Path) -> Iterator[Reader]:
    """Open a data directory read-only, also while a server uses it.

    Example:
        >>> with open_reader(config.engine_dir) as reader:
        ...     print(MetricReader(reader).names(run_id))
    """
    if not (root / DATABASE_FILE).is_file():
        raise SetupError(
            f"{root} contains no engine data; start a server on it once with tinkex serve, or choose another with --data-dir."
        )
    reader = Reader(root / DATABASE_FILE)
    try:
        yield reader
    finally:
        reader.close()


def _secret(file: Path, make: Callable[[], str]) -> str:
    """Returns the secret in a file; creates the file, readable only by its owner, if it is missing."""
    try:
        return file.read_text("ascii").strip()
    except FileNotFoundError:
        made = make()
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(handle, f"{made}\n".encode("ascii"))
    finally:
        os.close(handle)
    return made


def _check_no_foreign_files(root: Path) -> None:
    """Reject a directory that contains other files: unreferenced files are removed at every start."""
    if (root / DATABASE_FILE).exists():
        return
    known = {LOCK_FILE, KEY_FILE, SIGNING_KEY_FILE}
    foreign = next((entry.name for entry in root.iterdir() if entry.name not in known), None)
    if foreign is not None:
        raise SetupError(
            f"{root} cannot be used as a data directory: it contains other files ({foreign}) and no engine data; "
            "choose an empty or new directory with --data-dir."
        )
