"""Notices when nothing finishes any more, and ends the calls that wait in vain."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from tinkex.errors import APIConnectionError

__all__ = ["Progress"]


class Progress:
    """The calls of one client that are under way, and when the last of them finished.

    When none has finished for ``limit_s`` seconds, all of them end with an ``APIConnectionError`` that says
    what the server last said about its queue. Used on the background loop only.
    """

    def __init__(self, limit_s: float | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._tasks: set[asyncio.Task[object]] = set()
        self._given_up: set[asyncio.Task[object]] = set()
        self._last = self._clock()
        self._alarm: asyncio.TimerHandle | None = None
        self._queue: tuple[str, str | None] | None = None

    @property
    def silent_s(self) -> float:
        """Seconds since something finished, or since there was nothing to do."""
        return self._clock() - self._last

    def heard(self, queue_state: str, reason: str | None) -> None:
        """Notes what the server says about its queue."""
        self._queue = (queue_state, reason)

    @asynccontextmanager
    async def of_this_call(self) -> AsyncIterator[None]:
        """Watches over the task that runs the block; a block that ends well is progress."""
        task: asyncio.Task[object] | None = asyncio.current_task()
        assert task is not None
        if not self._tasks:
            self._last = self._clock()
        self._tasks.add(task)
        if self._alarm is None and self._limit_s is not None:
            self._alarm = asyncio.get_running_loop().call_later(self._limit_s, self.check)
        try:
            yield
        except asyncio.CancelledError:
            if task not in self._given_up:
                raise
            task.uncancel()  # the alarm cancelled the call, not the caller that waits for it
            raise self._no_progress() from None
        else:
            self._last = self._clock()
        finally:
            self._tasks.discard(task)
            self._given_up.discard(task)

    def check(self) -> None:
        """Ends the calls under way, if nothing has finished for too long."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if not self._tasks or self._limit_s is None:
            return
        left = self._limit_s - self.silent_s
        if left > 0:
            self._alarm = asyncio.get_running_loop().call_later(left, self.check)
            return
        for task in self._tasks:
            self._given_up.add(task)
            task.cancel()

    def _no_progress(self) -> APIConnectionError:
        said = "it said nothing about its queue"
        if self._queue is not None:
            state, reason = self._queue
            said = f"it last said that its queue is {state.replace('_', ' ')}" + (
                f": {reason}" if reason else ""
            )
        return APIConnectionError(
            None,
            f"no progress: the server has finished no sample of this client for {self._limit_s:g} s; {said}. "
            "Look at the server, then sample again, or wait longer with RetryConfig(progress_timeout=…)",
        )
