"""The lock that prevents two engines from using the same data directory."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from tinkex.errors import SetupError

LOCK_FILE = "engine.lock"
LOCK_WAIT_S = 2.0
"""How long to wait for the lock: a process that a killed engine was just starting holds it for a moment."""
RETRY_S = 0.05


class DirectoryLock:
    """An exclusive lock on a directory, held until :meth:`release`.

    The operating system releases the lock when the process exits for any reason, so a stale file never blocks.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory, DirectoryLock(Path(directory)) as lock:
    ...     lock.held
    True
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / LOCK_FILE
        self._fd: int | None = None
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            _lock_soon(fd)
        except OSError:
            holder = os.read(fd, 32).decode("ascii", "replace").strip()
            os.close(fd)
            raise SetupError(
                f"the data directory {directory} is in use by another engine (process {holder or 'unknown'}); "
                "stop it, or choose another directory with --data-dir."
            ) from None
        os.ftruncate(fd, 0)
        os.write(fd, f"{os.getpid()}\n".encode("ascii"))
        self._fd = fd

    @property
    def held(self) -> bool:
        """Whether this process holds the lock."""
        return self._fd is not None

    def release(self) -> None:
        """Release the lock."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _lock_soon(fd: int) -> None:
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            _lock(fd)
        except OSError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(RETRY_S)
        else:
            return


if sys.platform == "win32":
    import msvcrt

    def _lock(fd: int) -> None:
        # Locks a byte far beyond the process id, so that other processes can read the id.
        os.lseek(fd, 1024, os.SEEK_SET)
        msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
        os.lseek(fd, 0, os.SEEK_SET)

else:
    import fcntl

    def _lock(fd: int) -> None:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
