"""The background event loop, and how other threads submit work to it.

All network I/O of a process runs on one loop in one daemon thread, started at first use. Callers use it from
synchronous code (:meth:`Background.run`), from their own event loop, or through the future that
:meth:`Background.submit` returns. If the loop stops although the program continues, its calls
fail with ``LoopStoppedError`` and the next one starts a new loop.
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
from typing import Any, Protocol, TypeVar

from tinkex._runtime.api_future import (
    APIFuture,
    AwaitableConcurrentFuture,
    LoopThread,
    await_future,
    check_may_block,
    on_event_loop,
)
from tinkex._runtime.loop_future import DoneCallback, LoopFuture
from tinkex.errors import ClosedError, LoopStoppedError
from tinkex.observability.callbacks import CallbackQueue, drain, follow_deliveries

__all__ = [
    "APIFuture",
    "AwaitableConcurrentFuture",
    "Background",
    "LoopFuture",
    "await_future",
    "background",
    "before_stop",
    "check_may_block",
    "create_detached_task",
    "on_event_loop",
    "on_exit",
    "resume_on_new_loop",
    "run_in_daemon_thread",
]

T = TypeVar("T")

STOP_TIMEOUT_S = 5.0
MAX_DRAIN_S = 1.0
"""How long interpreter exit waits until the user's sinks have received the last events."""


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
        self.failure: LoopStoppedError | None = None
        """Set if the loop has stopped for another reason: its calls end with this error, and the next one starts a new loop."""
        self.tasks: dict[asyncio.Task[Any], LoopFuture[Any] | None] = {}
        """The tasks in flight with their futures; the loop itself has only weak references to them."""
        self._submitted: deque[tuple[Coroutine[Any, Any, Any], LoopFuture[Any]]] = deque()
        self._wake_pending = False
        self._thread = LoopThread(target=self._serve, name="tinkex", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            while not self.loop.is_closed():
                try:
                    self.loop.run_forever()
                except (SystemExit, KeyboardInterrupt):
                    # A user callback called sys.exit() here. Its waiter receives the exception; asyncio would also stop
                    # the loop and leave all other waiters blocked forever.
                    continue
                return
        finally:
            if not self.stopping:
                self._fail()

    def _fail(self) -> None:
        """Ends all calls in flight: the loop was stopped, or failed, although the program continues."""
        self.failure = LoopStoppedError(
            "the client's background event loop was stopped while this call was in flight, so its outcome is unknown; "
            "make the call again, which starts a new loop"
        )
        for future in list(self.tasks.values()):
            if future is not None:
                future.fail(self.failure)
        self._fail_submitted()
        try:
            self.loop.run_until_complete(self._shut_down())
        except Exception:  # noqa: BLE001, S110 - the loop may be broken; its calls have failed already
            pass
        finally:
            self.loop.close()
        self._fail_submitted()  # those of the time until the loop was closed

    def _fail_submitted(self) -> None:
        assert self.failure is not None
        while self._submitted:
            coroutine, future = self._submitted.popleft()
            coroutine.close()
            future.fail(self.failure)

    @property
    def is_current_thread(self) -> bool:
        """Whether the caller runs on the loop's own thread, where waiting for the loop would deadlock."""
        return threading.current_thread() is self._thread

    def submit(
        self,
        coroutine: Coroutine[Any, Any, T],
        on_done: DoneCallback | None = None,
        callbacks: CallbackQueue | None = None,
    ) -> LoopFuture[T]:
        """Starts a coroutine on the loop, in the caller's context; cancelling the returned future cancels it.

        ``callbacks`` is the queue of the client, for callbacks that users add to the future.
        """
        context = contextvars.copy_context()
        follow_deliveries(context)
        future: LoopFuture[T] = LoopFuture(self, on_done, context, callbacks)
        self._submitted.append((coroutine, future))
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
                if self.failure is not None:
                    return background().submit(coroutine, on_done, callbacks)
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
            coroutine, future = self._submitted.popleft()
            if future.cancelled():
                coroutine.close()
                future.set_running_or_notify_cancel()  # for concurrent.futures.wait
            else:
                future.task = task = self.loop.create_task(coroutine, context=future.context)
                self.tasks[task] = future
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
        self.tasks[task] = None
        task.add_done_callback(self.tasks.pop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on the loop and waits for its value; an interrupt cancels it."""
        try:
            check_may_block()
        except RuntimeError:
            coroutine.close()
            raise
        return self.wait(self.submit(coroutine))

    def wait(self, future: Future[T]) -> T:
        """Waits for a future of the loop; an interrupt cancels it."""
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def _shut_down(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_TIMEOUT_S):
                # Repeated: a cancelled task may start another one, such as the one that sends cancellations to the server.
                while others := [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]:
                    for task in others:
                        task.cancel()
                    await asyncio.gather(*others, return_exceptions=True)
        for callback in _stop_callbacks:
            callback()
        await self.loop.shutdown_asyncgens()

    def stop(self) -> None:
        """Cancels all tasks, joins the thread and closes the loop."""
        self.stopping = True
        if self.failure is not None:
            return  # it has stopped already
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._shut_down(), self.loop).result(STOP_TIMEOUT_S)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(STOP_TIMEOUT_S)
        if not self._thread.is_alive():
            self.loop.close()


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
    if current is not None and current.failure is None:
        return current
    with _lock:
        if _current is None or _current.failure is not None:
            resumed = _current is not None
            _current = Background()
            if resumed:
                for each in list(_resumable):
                    _current.call(each.resume)
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


class Resumable(Protocol):
    """Has tasks that must not end with a loop, such as heartbeats."""

    def resume(self) -> None:
        """Starts them again; called on the new loop."""


_resumable: weakref.WeakSet[Resumable] = weakref.WeakSet()


def resume_on_new_loop(owner: Resumable) -> None:
    """Calls ``owner.resume()`` whenever the loop has stopped unexpectedly and the next call has started a new one."""
    _resumable.add(owner)


def before_stop(callback: Callable[[], None]) -> None:
    """Runs ``callback`` on every background loop that is about to stop, after its tasks are done."""
    _stop_callbacks.append(callback)


def _after_fork() -> None:
    global _current, _lock  # noqa: PLW0603 - the child has neither the thread nor a usable lock
    _lock = threading.Lock()
    if _current is not None:
        _abandoned.append(_current)
    _current = None
    _resumable.clear()
    _exit_callbacks.clear()


def _at_exit() -> None:
    if _current is not None:
        _current.stop()
    drain(MAX_DRAIN_S)
    while _exit_callbacks:
        _exit_callbacks.pop()()
