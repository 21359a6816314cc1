"""Commits that survive a power failure: one flush of the write-ahead log for all who wait for one."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future
from pathlib import Path


class Flusher:
    """Flushes a file to disk on a thread of its own; everybody who asks during one flush shares the next.

    A commit of the database is in its write-ahead log when it returns, so it survives the death of the process; after a
    flush of that log it survives the death of the machine as well.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     flusher = Flusher(Path(file.name))
    ...     flusher.flushed().result()
    ...     flusher.close()
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR)
        self._changed = threading.Condition()
        self._next: Future[None] | None = None
        self._failure: OSError | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="tinkex-flush", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> OSError | None:
        """Why flushing failed. It stays: after a failed flush the system may drop what was never written."""
        return self._failure

    def flushed(self) -> Future[None]:
        """Done when everything committed before this call is on disk; raises ``OSError`` if it cannot be."""
        with self._changed:
            if self._next is None:
                self._next = Future()
                # Many callers share it: none of them may cancel it for the others.
                self._next.set_running_or_notify_cancel()
                if self._closing:
                    self._next.set_exception(OSError("the engine is closing"))
                self._changed.notify()
            return self._next

    def close(self) -> None:
        """Do the flush that was asked for, then end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()
        os.close(self._file)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next is not None or self._closing)
                asked, self._next = self._next, None
            if asked is None:
                return
            if self._failure is None:
                try:
                    _flush(self._file)
                except OSError as error:
                    self._failure = error
            if self._failure is None:
                asked.set_result(None)
            else:
                asked.set_exception(self._failure)


_flush = getattr(os, "fdatasync", os.fsync)


def flush_path(path: Path) -> None:
    """Make sure that a file, or the names in a directory, are on disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows keeps directories by itself, and cannot open them
    descriptor = os.open(path, os.O_RDWR if path.is_file() else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
