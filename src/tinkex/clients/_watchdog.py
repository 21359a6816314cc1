"""The progress watchdog: ends the calls of a client when none of them finishes for too long."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from tinkex.errors import APIConnectionError

__all__ = ["ProgressWatchdog"]


class ProgressWatchdog:
    """The calls of one client in flight, and when the last of them finished.

    When none has finished for ``timeout_s`` seconds, all of them raise an ``APIConnectionError`` with the last queue state that
    the server reported. Used on the background loop only.
    """

    def __init__(self, timeout_s: float | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._tasks: set[asyncio.Task[object]] = set()
        self._timed_out: set[asyncio.Task[object]] = set()
        self._last_progress = self._clock()
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        """The loop of the timer."""
        self._queue: tuple[str, str | None] | None = None

    @property
    def idle_s(self) -> float:
        """Seconds since a call finished, or since there was none in flight."""
        return self._clock() - self._last_progress

    def record_queue_state(self, queue_state: str, reason: str | None) -> None:
        """Records the queue state that the server reports."""
        self._queue = (queue_state, reason)

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[None]:
        """Watches the task that runs the block; a block that succeeds is progress."""
        task: asyncio.Task[object] | None = asyncio.current_task()
        assert task is not None
        if not self._tasks:
            self._last_progress = self._clock()
        self._tasks.add(task)
        if self._timeout_s is not None:
            loop = asyncio.get_running_loop()
            if self._timer is None or self._loop is not loop:
                self._loop = loop
                self._timer = loop.call_later(self._timeout_s, self.check)
        try:
            yield
        except asyncio.CancelledError:
            if task not in self._timed_out:
                raise
            task.uncancel()  # the timer cancelled the call, not the task that waits for it
            raise self._no_progress() from None
        else:
            self._last_progress = self._clock()
        finally:
            self._tasks.discard(task)
            self._timed_out.discard(task)

    def check(self) -> None:
        """Ends the calls in flight if none has finished for too long."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._tasks or self._timeout_s is None:
            return
        remaining_s = self._timeout_s - self.idle_s
        if remaining_s > 0:
            self._timer = asyncio.get_running_loop().call_later(remaining_s, self.check)
            return
        for task in self._tasks:
            self._timed_out.add(task)
            task.cancel()

    def _no_progress(self) -> APIConnectionError:
        queue = "it reported no queue state"
        if self._queue is not None:
            state, reason = self._queue
            queue = f"its last queue state is {state.replace('_', ' ')}" + (f": {reason}" if reason else "")
        return APIConnectionError(
            None,
            f"no progress: the server has finished no sample of this client for {self._timeout_s:g} s; {queue}. "
            "Look at the server, then sample again, or wait longer with RetryConfig(progress_timeout=…)",
        )
