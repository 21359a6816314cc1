"""The future of a coroutine on the background loop, and what happens when it is done."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Callable
from concurrent.futures import InvalidStateError
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from tinkex._runtime.api_future import AwaitableConcurrentFuture
from tinkex.observability.callbacks import CallbackQueue, undelivered

if TYPE_CHECKING:
    from tinkex._runtime import Background

__all__ = ["DoneCallback", "LoopFuture"]

T = TypeVar("T")

DoneCallback: TypeAlias = Callable[[BaseException | None], None]
"""Called with a coroutine's exception, or None, before its waiters are notified."""


class LoopFuture(AwaitableConcurrentFuture[T]):
    """The future of a coroutine on the background loop; cancelling it cancels the coroutine."""

    def __init__(
        self,
        owner: Background,
        on_done: DoneCallback | None,
        context: contextvars.Context,
        callbacks: CallbackQueue | None,
    ) -> None:
        super().__init__()
        self.task: asyncio.Task[T] | None = None
        self.context: contextvars.Context | None = context
        """The context of the call; None once it is done."""
        self._owner = owner
        self._on_done = on_done
        self._callbacks = callbacks
        self._outcome: list[asyncio.Task[T]] = []
        """The finished task, while sinks receive the events of the call."""

    def result(self, timeout: float | None = None) -> T:
        """Waits for the coroutine's value; raises ``CancelledError`` while the interpreter exits."""
        if self._owner.stopping and not self.done():
            super().cancel()
        return super().result(timeout)

    def cancel(self) -> bool:
        """Cancels the coroutine, unless it is done."""
        if not super().cancel():
            return False
        if self._on_done is not None:
            self._on_done(asyncio.CancelledError())
        task = self.task
        if task is not None:
            with contextlib.suppress(RuntimeError):  # a stopped loop has cancelled it already
                self._owner.loop.call_soon_threadsafe(task.cancel)
        return True

    def fail(self, error: BaseException) -> None:
        """Ends the future with an error, whatever happens to its task."""
        if self._on_done is not None and not self.done():
            self._on_done(error)
        with contextlib.suppress(InvalidStateError):  # it was cancelled meanwhile
            self.set_exception(error)

    def copy_outcome(self, task: asyncio.Task[T]) -> None:
        """Copies the result or exception of the finished task, after the user's sinks have received the call's events."""
        self._owner.tasks.pop(task, None)
        self.task = None
        context, self.context = self.context, None
        if self._owner.failure is not None:
            self.fail(self._owner.failure)
            if not task.cancelled():
                task.exception()  # retrieved so that asyncio logs no warning
            return
        if self._on_done is not None:
            self._on_done(asyncio.CancelledError() if task.cancelled() else task.exception())
        if task.cancelled() and self._owner.stopping:
            return  # only daemon threads can be waiting: left blocked, they exit quietly with the process
        queues = undelivered(context) if context is not None else []
        self._outcome.append(task)
        if not queues:
            self._complete()
            return
        waiting = set(queues)

        def delivered(queue: CallbackQueue) -> None:
            waiting.discard(queue)
            if not waiting:
                self._complete()

        def stop_waiting(queue: CallbackQueue) -> None:
            if queue in waiting and queue.pending:
                queue.behind = True
            delivered(queue)

        for queue in queues:
            queue.put("result", delivered, queue, droppable=False)
            self._owner.loop.call_later(queue.max_wait_s, stop_waiting, queue)

    def _complete(self) -> None:
        try:
            task = self._outcome.pop()
        except IndexError:
            return  # the other of the two, delivery and timeout, was first
        if task.cancelled():
            super().cancel()
            self.set_running_or_notify_cancel()
        elif not self.set_running_or_notify_cancel():
            task.exception()  # there is no waiter; retrieved so that asyncio logs no warning
        elif (error := task.exception()) is not None:
            self.set_exception(error)
        else:
            self.set_result(task.result())
