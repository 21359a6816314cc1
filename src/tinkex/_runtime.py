"""The background event loop: the only module in which one thread submits work to another.

All network I/O of a process runs on one loop in one daemon thread, started at first use. Callers use it from
synchronous code (:meth:`Background.run`), from their own event loop (:func:`await_future`), or through the
``concurrent.futures.Future`` that :meth:`Background.submit` returns.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import contextvars
import functools
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeAlias, TypeVar

from tinkex.errors import ClosedError

__all__ = [
    "Background",
    "await_future",
    "background",
    "before_stop",
    "create_detached_task",
    "on_exit",
    "run_in_daemon_thread",
]

T = TypeVar("T")

DoneCallback: TypeAlias = Callable[[BaseException | None], None]
"""Called with a coroutine's exception, or None, before its waiters are notified."""

STOP_TIMEOUT_S = 5.0


class LoopFuture(Future[T]):
    """The future of a coroutine on the background loop; cancelling it cancels the coroutine."""

    def __init__(self, owner: Background, on_done: DoneCallback | None) -> None:
        super().__init__()
        self.task: asyncio.Task[T] | None = None
        self._owner = owner
        self._on_done = on_done

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

    def copy_outcome(self, task: asyncio.Task[T]) -> None:
        """Copies the result or exception of the finished task."""
        self.task = None
        if self._on_done is not None:
            self._on_done(asyncio.CancelledError() if task.cancelled() else task.exception())
        if task.cancelled() and self._owner.stopping:
            return  # only daemon threads can be waiting: left blocked, they exit quietly with the process
        if task.cancelled():
            super().cancel()
            self.set_running_or_notify_cancel()
        elif not self.set_running_or_notify_cancel():
            task.exception()  # there is no waiter; retrieved so that asyncio logs no warning
        elif (error := task.exception()) is not None:
            self.set_exception(error)
        else:
            self.set_result(task.result())


class Background:
    """An event loop in a daemon thread.

    >>> async def answer() -> int:
    ...     return 42
    >>> background().run(answer())
    42
    """

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.stopping = False
        """Whether the loop is stopping because the interpreter exits."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._submitted: deque[tuple[Coroutine[Any, Any, Any], LoopFuture[Any], contextvars.Context]] = (
            deque()
        )
        self._wake_pending = False
        self._thread = threading.Thread(target=self._serve, name="tinkex", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        while not self.loop.is_closed():
            try:
                self.loop.run_forever()
            except (SystemExit, KeyboardInterrupt):
                # A user callback called sys.exit() here. Its waiter receives the exception; asyncio would also stop the
                # loop and leave all other waiters blocked forever.
                continue
            return

    @property
    def is_current_thread(self) -> bool:
        """Whether the caller runs on the loop's own thread, where waiting for the loop would deadlock."""
        return threading.current_thread() is self._thread

    def submit(self, coroutine: Coroutine[Any, Any, T], on_done: DoneCallback | None = None) -> Future[T]:
        """Starts a coroutine on the loop, in the caller's context; cancelling the returned future cancels it."""
        future: LoopFuture[T] = LoopFuture(self, on_done)
        self._submitted.append((coroutine, future, contextvars.copy_context()))
        if not self._wake_pending:
            # Waking the loop is the expensive part: one wake-up serves every coroutine submitted until it runs.
            try:
                self._wake_pending = True
                self.loop.call_soon_threadsafe(self._start_submitted)
            except KeyboardInterrupt:
                self._wake_pending = False  # the wake-up may be lost: the next submit repeats it
                raise
            except RuntimeError as error:
                self._submitted.clear()
                self._wake_pending = False
                coroutine.close()
                stopped = ClosedError(
                    "the background loop has stopped because the program is ending; "
                    "finish calls before the interpreter exits"
                )
                if on_done is not None:
                    on_done(stopped)
                raise stopped from error
        return future

    def _start_submitted(self) -> None:
        self._wake_pending = False  # before the queue is drained: a later submit must wake the loop again
        while self._submitted:
            coroutine, future, context = self._submitted.popleft()
            if future.cancelled():
                coroutine.close()
            else:
                future.task = task = self.loop.create_task(coroutine, context=context)
                # The loop holds only a weak reference: without this one the task could be garbage-collected.
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                task.add_done_callback(future.copy_outcome)
                if future.cancelled():
                    task.cancel()

    def start(self, coroutine: Coroutine[Any, Any, None], *, detached: bool = False) -> None:
        """Starts a coroutine that has no future and cannot be cancelled; it must handle its own errors.

        It runs in the caller's context, or in an empty one if ``detached``: then it belongs to the client, not to a call.
        """
        context = contextvars.Context() if detached else contextvars.copy_context()
        if not self.call(functools.partial(self.spawn, coroutine, context)):
            coroutine.close()  # the interpreter exits

    def call(self, function: Callable[[], None]) -> bool:
        """Schedules a function on the loop; returns False if the loop has stopped."""
        try:
            self.loop.call_soon_threadsafe(function)
        except RuntimeError:
            return False
        return True

    def spawn(self, coroutine: Coroutine[Any, Any, None], context: contextvars.Context) -> None:
        """Starts a coroutine from the loop's own thread, and keeps a reference to its task until it is done."""
        task = self.loop.create_task(coroutine, context=context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on the loop and waits for its value; an interrupt cancels it."""
        try:
            self.check_may_block()
        except RuntimeError:
            coroutine.close()
            raise
        return self.wait(self.submit(coroutine))

    def check_may_block(self) -> None:
        """Raises ``RuntimeError`` on the loop's own thread, which a blocking call would block for ever."""
        if self.is_current_thread:
            raise RuntimeError(
                "a blocking call was made on the client's own event loop, where it would deadlock; "
                "use the *_async form there"
            )

    def wait(self, future: Future[T]) -> T:
        """Waits for a future of the loop; an interrupt cancels it."""
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """Cancels all tasks, joins the thread and closes the loop."""
        self.stopping = True

        async def shut_down() -> None:
            # Repeated: a cancelled task may start another one, such as the one that sends cancellations to the server.
            while others := [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]:
                for task in others:
                    task.cancel()
                await asyncio.gather(*others, return_exceptions=True)
            for callback in _stop_callbacks:
                callback()
            await self.loop.shutdown_asyncgens()

        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(shut_down(), self.loop).result(STOP_TIMEOUT_S)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(STOP_TIMEOUT_S)
        if not self._thread.is_alive():
            self.loop.close()


class _BatchNotifier:
    """Completes futures of one loop from other threads, with one wake-up for those that come close together."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._ready: deque[asyncio.Future[None]] = deque()
        self._wake_pending = False

    def notify(self, ready: asyncio.Future[None], _: Future[Any]) -> None:
        """Completes ``ready`` on its loop."""
        self._ready.append(ready)
        loop = self._loop()
        if loop is not None and not self._wake_pending:
            self._wake_pending = True
            # The caller's loop may be closed by now: then there is no waiter.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._complete_ready)

    def _complete_ready(self) -> None:
        self._wake_pending = False  # before the queue is drained: a later notify must wake the loop again
        while self._ready:
            ready = self._ready.popleft()
            if not ready.done():
                ready.set_result(None)


_notifiers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _BatchNotifier] = weakref.WeakKeyDictionary()


async def await_future(future: Future[T], *, propagate_cancel: bool = False) -> T:
    """Awaits a future of the background loop on the caller's own loop.

    Cancelling the awaiting task cancels the future only if ``propagate_cancel`` is set.
    """
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    notifier = _notifiers.get(loop)
    if notifier is None:
        notifier = _notifiers[loop] = _BatchNotifier(loop)
    future.add_done_callback(functools.partial(notifier.notify, ready))
    try:
        await ready
    except asyncio.CancelledError:
        if propagate_cancel:
            future.cancel()
        raise
    if future.cancelled():
        raise asyncio.CancelledError
    return future.result()


def create_detached_task(coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Creates a task on the running loop in an empty context, for work that several calls share."""
    return asyncio.get_running_loop().create_task(coroutine, context=contextvars.Context())


async def run_in_daemon_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Runs a function that may block forever in its own daemon thread, which does not delay interpreter exit.

    The loop's default executor has few threads, and DNS lookups need them.

    >>> background().run(run_in_daemon_thread(sum, [1, 2]))
    3
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def complete(setter: Callable[[Any], None], value: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has stopped
            loop.call_soon_threadsafe(lambda: None if outcome.done() else setter(value))

    def work() -> None:
        try:
            value = function(*arguments)
        except BaseException as error:  # noqa: BLE001 - raised in the awaiting task
            complete(outcome.set_exception, error)
        else:
            complete(outcome.set_result, value)

    threading.Thread(target=contextvars.copy_context().run, args=(work,), name="tinkex", daemon=True).start()
    return await outcome


_lock = threading.Lock()
_current: Background | None = None
_hooked = False
_exit_callbacks: list[Callable[[], None]] = []
_stop_callbacks: list[Callable[[], None]] = []
# A loop inherited through fork shares its kernel objects with the parent. Closing it here would break the parent's,
# so a reference is kept to prevent its finalizer from running.
_abandoned: list[Background] = []


def background() -> Background:
    """Returns the background loop of this process, started at the first call; a forked child gets its own."""
    global _current, _hooked  # noqa: PLW0603 - one loop per process is the point
    current = _current
    if current is not None:
        return current
    with _lock:
        if _current is None:
            _current = Background()
            if not _hooked:
                _hooked = True
                if hasattr(os, "register_at_fork"):  # absent on Windows
                    os.register_at_fork(after_in_child=_after_fork)
                atexit.register(_at_exit)
        return _current


def on_exit(callback: Callable[[], None]) -> None:
    """Runs ``callback`` when the interpreter exits, after the background loop has stopped."""
    background()
    _exit_callbacks.append(callback)


def before_stop(callback: Callable[[], None]) -> None:
    """Runs ``callback`` on every background loop that is about to stop, after its tasks are done."""
    _stop_callbacks.append(callback)


def _after_fork() -> None:
    global _current, _lock  # noqa: PLW0603 - the child has neither the thread nor a usable lock
    _lock = threading.Lock()
    if _current is not None:
        _abandoned.append(_current)
    _current = None
    _exit_callbacks.clear()


def _at_exit() -> None:
    if _current is not None:
        _current.stop()
    while _exit_callbacks:
        _exit_callbacks.pop()()
