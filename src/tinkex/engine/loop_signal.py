"""A signal from any thread to one reader on an event loop."""

from __future__ import annotations

import asyncio
import contextlib


class LoopSignal:
    """Wakes a reader on the event loop that it was made on; notifications before the reader runs count once.

    Example:
        >>> signal = LoopSignal()
        >>> signal.notify()  # on any thread
        >>> await signal.changed()
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._notified = False

    def notify(self) -> None:
        """Wake the reader, from any thread."""
        if not self._notified:
            self._notified = True
            with contextlib.suppress(RuntimeError):  # the reader's loop is closed
                self._loop.call_soon_threadsafe(self._changed.set)

    async def changed(self) -> None:
        """Wait for a notification since the last call returned."""
        await self._changed.wait()
        self._changed.clear()
        self._notified = False  # before anything is read: what changes from now on wakes the reader again
