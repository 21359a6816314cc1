"""Group commit: concurrent waiters share one flush of the write-ahead log to disk."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import TypeAlias

_Group: TypeAlias = tuple["Future[None]", "asyncio.AbstractEventLoop", "list[asyncio.Future[None]]"]


class Flusher:
    """Flushes a file to disk on its own thread; all calls made during one flush share the next.

    A database commit is in the write-ahead log when it returns, so it survives a crash of the process; once the log is
    flushed it also survives a power failure.

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
        self._group: _Group | None = None
        self._thread = threading.Thread(target=self._run, name="tinkex-flush", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> OSError | None:
        """Why flushing failed. It is permanent: after a failed fsync the kernel may drop the unwritten pages."""
        return self._failure

    def flushed(self) -> Future[None]:
        """Returns a future that completes when everything committed before this call is on disk, or fails with ``OSError``."""
        with self._changed:
            if self._next is None:
                self._next = Future()
                # Callers share it: none of them may cancel it for the others.
                self._next.set_running_or_notify_cancel()
                if self._closing:
                    self._next.set_exception(OSError("the engine is closing"))
                self._changed.notify()
            return self._next

    async def wait(self) -> None:
        """The same for an event loop: all who wait for one flush are woken together."""
        loop, flush = asyncio.get_running_loop(), self.flushed()
        group = self._group
        if group is None or group[0] is not flush or group[1] is not loop:
            self._group = group = (flush, loop, [])
            flush.add_done_callback(lambda _: _wake(group))
        waiter: asyncio.Future[None] = loop.create_future()
        group[2].append(waiter)
        await waiter

    def close(self) -> None:
        """Complete the pending flush, then stop the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()
        os.close(self._file)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next is not None or self._closing)
                pending, self._next = self._next, None
            if pending is None:
                return
            if self._failure is None:
                try:
                    _flush(self._file)
                except OSError as error:
                    self._failure = error
            if self._failure is None:
                pending.set_result(None)
            else:
                pending.set_exception(self._failure)


def _wake(group: _Group) -> None:
    flush, loop, waiters = group
    failure = flush.exception()

    def wake() -> None:
        for waiter in waiters:
            if waiter.done():
                continue
            if failure is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(failure)

    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(wake)


_flush = getattr(os, "fdatasync", os.fsync)


def flush_path(path: Path) -> None:
    """Flush a file, or the entries of a directory, to disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows cannot open directories, and does not need to flush them
    descriptor = os.open(path, os.O_RDWR if path.is_file() else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
