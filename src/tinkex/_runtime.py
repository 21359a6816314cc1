"""The background event loop: the only module in which one thread hands work to another.

All network work of a process runs on one loop in one daemon thread, started at first use. Callers reach it
from plain code (:meth:`Background.run`), from any event loop of their own (:func:`arrival`), or by keeping
the ``concurrent.futures.Future`` that :meth:`Background.submit` returns.
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

__all__ = ["Background", "arrival", "background", "before_stop", "in_own_thread", "on_exit", "start_alone"]

T = TypeVar("T")

Ended: TypeAlias = Callable[[BaseException | None], None]
"""Hears how a coroutine ended, before those who wait for it do."""

STOP_TIMEOUT_S = 5.0


class Handed(Future[T]):
    """The outcome of a coroutine on the background loop; cancelling it cancels the coroutine."""

    def __init__(self, home: Background, ended: Ended | None) -> None:
        super().__init__()
        self.task: asyncio.Task[T] | None = None
        self._home = home
        self._ended = ended

    def result(self, timeout: float | None = None) -> T:
        """The outcome, once it is there; after the end of the program there will be none."""
        if self._home.ending and not self.done():
            super().cancel()
        return super().result(timeout)

    def cancel(self) -> bool:
        """Cancels the coroutine, unless it has ended."""
        if not super().cancel():
            return False
        if self._ended is not None:
            self._ended(asyncio.CancelledError())
        task = self.task
        if task is not None:
            with contextlib.suppress(RuntimeError):  # a loop that has stopped has cancelled it already
                self._home.loop.call_soon_threadsafe(task.cancel)
        return True

    def arrived(self, task: asyncio.Task[T]) -> None:
        """Takes over the outcome of the coroutine."""
        self.task = None
        if self._ended is not None:
            self._ended(asyncio.CancelledError() if task.cancelled() else task.exception())
        if task.cancelled() and self._home.ending:
            return  # only daemon threads can be waiting: left asleep, they end with the program and in silence
        if task.cancelled():
            super().cancel()
            self.set_running_or_notify_cancel()
        elif not self.set_running_or_notify_cancel():
            task.exception()  # nobody waits any more; read, so that asyncio does not complain
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
        self.ending = False
        """Whether the program is ending, and the loop with it."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._inbox: deque[tuple[Coroutine[Any, Any, Any], Handed[Any], contextvars.Context]] = deque()
        self._told = False
        self._thread = threading.Thread(target=self._serve, name="tinkex", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        while not self.loop.is_closed():
            try:
                self.loop.run_forever()
            except (SystemExit, KeyboardInterrupt):
                # A function of the program's called sys.exit() here. Whoever waits for that call gets it; asyncio would
                # end the loop as well, and leave all others waiting for ever.
                continue
            return

    @property
    def is_current_thread(self) -> bool:
        """Whether the caller runs on the loop's own thread, where waiting for the loop would never end."""
        return threading.current_thread() is self._thread

    def submit(self, coroutine: Coroutine[Any, Any, T], ended: Ended | None = None) -> Future[T]:
        """Starts a coroutine on the loop, in the caller's context; cancelling the returned future cancels it."""
        future: Handed[T] = Handed(self, ended)
        self._inbox.append((coroutine, future, contextvars.copy_context()))
        if not self._told:
            # Waking the loop costs more than the rest: one call does it for all that arrive meanwhile.
            try:
                self._told = True
                self.loop.call_soon_threadsafe(self._begin_all)
            except KeyboardInterrupt:
                self._told = False  # it may not have been told: whoever comes next tells it
                raise
            except RuntimeError as error:
                self._inbox.clear()
                self._told = False
                coroutine.close()
                stopped = ClosedError(
                    "the background loop has stopped because the program is ending; "
                    "finish calls before the interpreter exits"
                )
                if ended is not None:
                    ended(stopped)
                raise stopped from error
        return future

    def _begin_all(self) -> None:
        self._told = False  # before the inbox is emptied: whoever adds to it from now on tells us again
        while self._inbox:
            coroutine, future, context = self._inbox.popleft()
            if future.cancelled():
                coroutine.close()
            else:
                future.task = task = self.loop.create_task(coroutine, context=context)
                # Held until it ends: the loop alone would let it be collected while it waits.
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                task.add_done_callback(future.arrived)
                if future.cancelled():
                    task.cancel()

    def start(self, coroutine: Coroutine[Any, Any, None], *, alone: bool = False) -> None:
        """Starts a coroutine that nobody waits for and nobody can cancel; it must handle its own errors.

        It runs in the caller's context, or ``alone`` in none: then it belongs to the client, not to a call.
        """
        context = contextvars.Context() if alone else contextvars.copy_context()
        if not self.call(functools.partial(self.hold, coroutine, context)):
            coroutine.close()  # the program is ending: whoever waits for the outcome is told by submit()

    def call(self, function: Callable[[], None]) -> bool:
        """Has the loop call a function soon; False where the loop has stopped."""
        try:
            self.loop.call_soon_threadsafe(function)
        except RuntimeError:
            return False
        return True

    def hold(self, coroutine: Coroutine[Any, Any, None], context: contextvars.Context) -> None:
        """Starts a coroutine, from the loop itself; it is held until it ends, or it could be collected meanwhile."""
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
                "a blocking call was made on the client's own event loop, where it would wait for itself; "
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
        """Cancels what still runs, ends the thread and closes the loop."""
        self.ending = True

        async def wind_down() -> None:
            # Again and again: what ends may begin something else, such as telling the server of samples given up.
            while others := [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]:
                for task in others:
                    task.cancel()
                await asyncio.gather(*others, return_exceptions=True)
            for callback in _stop_callbacks:
                callback()
            await self.loop.shutdown_asyncgens()

        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(wind_down(), self.loop).result(STOP_TIMEOUT_S)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(STOP_TIMEOUT_S)
        if not self._thread.is_alive():
            self.loop.close()


class _Mailbox:
    """Wakes one loop for all results that arrive there at about the same time."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._arrived: deque[asyncio.Future[None]] = deque()
        self._told = False

    def put(self, arrived: asyncio.Future[None], _: Future[Any]) -> None:
        """Releases whoever waits for ``arrived`` on the loop."""
        self._arrived.append(arrived)
        loop = self._loop()
        if loop is not None and not self._told:
            self._told = True
            # The caller's loop may have been closed before the answer came: then nobody waits any more.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._told = False  # before the box is emptied: whoever adds to it from now on tells the loop again
        while self._arrived:
            arrived = self._arrived.popleft()
            if not arrived.done():
                arrived.set_result(None)


_mailboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Mailbox] = weakref.WeakKeyDictionary()


async def arrival(future: Future[T], *, cancel_with_me: bool = False) -> T:
    """Waits, on the caller's own loop, for a future of the background loop.

    When the waiting task is cancelled, the work goes on, unless ``cancel_with_me``.
    """
    loop = asyncio.get_running_loop()
    arrived: asyncio.Future[None] = loop.create_future()
    mailbox = _mailboxes.get(loop)
    if mailbox is None:
        mailbox = _mailboxes[loop] = _Mailbox(loop)
    future.add_done_callback(functools.partial(mailbox.put, arrived))
    try:
        await arrived
    except asyncio.CancelledError:
        if cancel_with_me:
            future.cancel()
        raise
    if future.cancelled():
        raise asyncio.CancelledError
    return future.result()


def start_alone(coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A task on the running loop that many calls share: it is in the context of none of them."""
    return asyncio.get_running_loop().create_task(coroutine, context=contextvars.Context())


async def in_own_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Runs a function that may take for ever: in a daemon thread of its own, which holds up nobody, nor the program's end.

    The threads that a loop keeps for such work are few, and looking up the names of hosts needs them too.

    >>> background().run(in_own_thread(sum, [1, 2]))
    3
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def tell(how: Callable[[Any], None], what: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has stopped meanwhile
            loop.call_soon_threadsafe(lambda: None if outcome.done() else how(what))

    def work() -> None:
        try:
            value = function(*arguments)
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits
            tell(outcome.set_exception, error)
        else:
            tell(outcome.set_result, value)

    threading.Thread(target=contextvars.copy_context().run, args=(work,), name="tinkex", daemon=True).start()
    return await outcome


_lock = threading.Lock()
_current: Background | None = None
_hooked = False
_exit_callbacks: list[Callable[[], None]] = []
_stop_callbacks: list[Callable[[], None]] = []
# A loop inherited through fork shares its kernel objects with the parent: closing it here would break the
# parent's, so it is kept and never touched again.
_abandoned: list[Background] = []


def background() -> Background:
    """The background loop of this process, started at the first call; a forked child gets its own."""
    global _current, _hooked  # noqa: PLW0603 - one loop per process is the point
    current = _current
    if current is not None:
        return current
    with _lock:
        if _current is None:
            _current = Background()
            if not _hooked:
                _hooked = True
                if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
                    os.register_at_fork(after_in_child=_after_fork)
                atexit.register(_at_exit)
        return _current


def on_exit(callback: Callable[[], None]) -> None:
    """Runs ``callback`` when the interpreter exits, after the background loop has stopped."""
    background()
    _exit_callbacks.append(callback)


def before_stop(callback: Callable[[], None]) -> None:
    """Runs ``callback`` on every background loop that is about to stop, after its tasks have ended."""
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
