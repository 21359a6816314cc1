"""The engine's cache of model directories: each is created once, and atomically."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tinkex.engine.model.progress import Progress, report
from tinkex.errors import SetupError

__all__ = ["ModelCache"]


class ModelCache:
    """Model directories below ``home``, one per key.

    A directory is built under a temporary name and renamed when complete. One process builds at a time; others wait for
    it and use the result.

    Example:
        >>> cache = ModelCache(Path("~/.tinkex/models").expanduser())
        >>> cache.obtain("my-model", lambda partial: convert_gguf(file, partial))
    """

    def __init__(self, home: Path) -> None:
        self.home = home

    def directory(self, key: str) -> Path:
        """The directory of the model with this key, whether it exists or not."""
        return self.home / key

    def find(self, key: str) -> Path | None:
        """The model's directory, if it exists."""
        directory = self.directory(key)
        return directory if (directory / "config.json").is_file() else None

    def obtain(
        self,
        key: str,
        make: Callable[[Path], None],
        *,
        origin: str = "new",
        resume: bool = False,
        progress: Progress | None = None,
    ) -> Path:
        """The model's directory, created by ``make(partial_directory)`` if it does not exist.

        With ``resume``, ``make`` gets the files of an interrupted attempt from the same ``origin``; otherwise they are
        removed first.
        """
        found = self.find(key)
        if found is not None:
            return found
        directory, partial = self.directory(key), self.home / ".partial" / f"{key}.{origin}"
        try:
            with self._lock(key, progress):
                found = self.find(key)
                if found is not None:
                    return found
                if directory.exists():
                    raise SetupError(
                        f"{directory} exists but is not a model directory (no config.json); remove it and try again"
                    )
                if partial.exists() and not resume:
                    shutil.rmtree(partial)
                partial.mkdir(parents=True, exist_ok=True)
                try:
                    make(partial)
                finally:
                    if not any(partial.iterdir()):
                        partial.rmdir()
                _fsync(partial)
                partial.rename(directory)
        except OSError as error:
            raise SetupError(
                f"cannot write the model cache {self.home} ({error}); free disk space or set TINKEX_HOME to a writable directory"
            ) from error
        return directory

    @contextmanager
    def _lock(self, key: str, progress: Progress | None) -> Iterator[None]:
        locks = self.home / ".locks"
        locks.mkdir(parents=True, exist_ok=True)
        with (locks / key).open("a+b") as file:
            if not _try_lock(file.fileno()):
                report(progress, f"waiting for another process that prepares {key}")
                _wait_lock(file.fileno())
            yield  # closing the file, or exiting, releases the lock


def _fsync(directory: Path) -> None:
    """Flushes every file to disk before the rename, so that a power failure cannot leave them incomplete."""
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            with path.open("rb+") as file:
                os.fsync(file.fileno())


if sys.platform == "win32":
    import msvcrt
    import time

    def _try_lock(descriptor: int) -> bool:
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

    def _wait_lock(descriptor: int) -> None:
        while not _try_lock(descriptor):
            time.sleep(0.2)

else:
    import fcntl

    def _try_lock(descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _wait_lock(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
