"""The future that every client method returns: for threads, for event loops and for ``concurrent.futures``."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tinkex.observability.callbacks import CallbackQueue

__all__ = [
    "APIFuture",
    "AwaitableConcurrentFuture",
    "LoopThread",
    "await_future",
    "check_may_block",
    "on_event_loop",
]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class LoopThread(threading.Thread):
    """The thread of a background loop, where nothing may wait for the loop."""


def on_event_loop() -> bool:
    """Whether the caller runs on an event loop, which a blocking call would block."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def check_may_block() -> None:
    """Raises ``RuntimeError`` on a background loop's own thread, which a blocking call would block for ever."""
    if isinstance(threading.current_thread(), LoopThread):
        raise RuntimeError(
            "a blocking call was made on the client's own event loop, where it would deadlock; await it there"
        )


class APIFuture(ABC, Generic[T_co]):
    """The result of a call, which may finish later.

    ``future.result()`` blocks, ``await future`` waits on any event loop. A timeout raises ``TimeoutError``
    and leaves the operation running; waiting again is fine.
    """

    __slots__ = ()

    @abstractmethod
    def result(self, timeout: float | None = None) -> T_co:
        """The result; waits up to ``timeout`` seconds, without limit by default.

        ::

            output = training.forward_backward(batch, "cross_entropy").result(timeout=600)
        """

    @abstractmethod
    async def result_async(self, timeout: float | None = None) -> T_co:
        """The result, for asynchronous callers; waits up to ``timeout`` seconds, without limit by default.

        ::

            output = await training.forward_backward(batch, "cross_entropy").result_async(timeout=600)
        """

    async def coroutine(self) -> T_co:
        """A new coroutine that waits for the result, for ``asyncio.create_task`` and ``TaskGroup``; cancelling it stops the waiting only.

        ::

            task = asyncio.create_task(sampler.sample(prompt, 1, params).coroutine())
        """
        return await self.result_async()

    def future(self) -> Future[T_co]:
        """The result as a ``concurrent.futures.Future``, for callbacks and ``concurrent.futures.wait``.

        ::

            done, pending = concurrent.futures.wait([each.future() for each in passes], timeout=60)
        """
        from tinkex._runtime import background

        return background().submit(self.result_async())

    def __await__(self) -> Generator[Any, None, T_co]:
        return self.result_async().__await__()


class AwaitableConcurrentFuture(Future[T], APIFuture[T]):
    """A ``concurrent.futures.Future`` that can be awaited: what client methods return.

    Made from another future, it follows that one: it ends as that one does, and cancelling it cancels both.

    >>> done: Future[int] = Future()
    >>> done.set_result(3)
    >>> AwaitableConcurrentFuture(done).result()
    3
    """

    def __init__(self, future: Future[T] | None = None) -> None:
        super().__init__()
        self._callbacks: CallbackQueue | None = None
        self._source: Future[T] | None = None
        if future is not None:
            self.follow(future)

    def follow(self, source: Future[T]) -> None:
        """Ends as another future does; cancelling this one cancels both."""
        self._source = source
        _call_when_done(source, self._copy)

    def run(self, call: Callable[[], Future[T] | APIFuture[T] | T]) -> None:
        """Makes a call that was put off, unless this future was cancelled, and ends as that call or its future does."""
        if self.cancelled():
            self.set_running_or_notify_cancel()
            return
        done: Future[T] = Future()
        try:
            returned = call()
        except Exception as error:  # noqa: BLE001 - nothing is hidden: the future raises it
            done.set_exception(error)
        else:
            if isinstance(returned, Future):
                done = returned
            elif isinstance(returned, APIFuture):
                done = returned.future()
            else:
                done.set_result(returned)
        self.follow(done)

    def _copy(self, done: Future[T]) -> None:
        if done.cancelled():
            super().cancel()
            self.set_running_or_notify_cancel()
        elif self.set_running_or_notify_cancel():
            error = done.exception()
            if error is not None:
                self.set_exception(error)
            else:
                self.set_result(done.result())

    def result(self, timeout: float | None = None) -> T:
        """The result; waits up to ``timeout`` seconds, without limit by default.

        Raises ``RuntimeError`` if it would block the client's own event loop, or a done-callback of this client.

        >>> future: AwaitableConcurrentFuture[int] = AwaitableConcurrentFuture()
        >>> future.set_result(3)
        >>> future.result(timeout=60)
        3
        """
        if not self.done():
            self._check_may_wait()
        return super().result(None if timeout == math.inf else timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The error of the operation, or None; waits up to ``timeout`` seconds, as :meth:`result` does.

        >>> future: AwaitableConcurrentFuture[int] = AwaitableConcurrentFuture()
        >>> future.set_exception(ValueError("no such model"))
        >>> future.exception()
        ValueError('no such model')
        """
        if not self.done():
            self._check_may_wait()
        return super().exception(None if timeout == math.inf else timeout)

    async def result_async(self, timeout: float | None = None) -> T:
        """The result, on any event loop; waits up to ``timeout`` seconds, and then leaves the operation running.

        >>> future: AwaitableConcurrentFuture[int] = AwaitableConcurrentFuture()
        >>> future.set_result(3)
        >>> asyncio.run(future.result_async(timeout=60))
        3
        """
        if timeout is None:
            return await await_future(self)
        async with asyncio.timeout(timeout):
            return await await_future(self)

    def future(self) -> Future[T]:
        """This future itself, which is a ``concurrent.futures.Future``.

        >>> future: AwaitableConcurrentFuture[int] = AwaitableConcurrentFuture()
        >>> future.future() is future
        True
        """
        return self

    def _check_may_wait(self) -> None:
        check_may_block()
        if self._callbacks is not None and self._callbacks.is_current_thread:
            raise RuntimeError(
                "a done-callback waits for a pending future of its own client, whose other callbacks would wait with it; "
                "add a callback to that future instead"
            )

    def cancel(self) -> bool:
        """Stops the operation if it can be stopped, else the waiting for it; returns whether there was no result yet.

        >>> future: AwaitableConcurrentFuture[int] = AwaitableConcurrentFuture()
        >>> future.cancel(), future.cancelled()
        (True, True)
        """
        if not super().cancel():
            return False
        if self._source is not None:
            self._source.cancel()
        return True

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        """Calls ``fn`` with the future when it is done, on a thread of its client; immediately if it is done.

        >>> future: AwaitableConcurrentFuture[int] = AwaitableConcurrentFuture()
        >>> future.set_result(3)
        >>> future.add_done_callback(lambda done: print(done.result()))
        3
        """
        if self.done():
            super().add_done_callback(fn)
            return
        queue = self._callbacks = self._callbacks or CallbackQueue()
        name = getattr(fn, "__qualname__", type(fn).__name__)
        self.call_when_done(lambda done: queue.put(name, fn, done, droppable=False))

    def call_when_done(self, function: Callable[[Future[T]], object]) -> None:
        """Calls a function of this package on the thread that completes the future; it must return immediately."""
        super().add_done_callback(function)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._summary()}>"

    def _repr_html_(self) -> str:
        then = "returns its result, or raises its error" if self.done() else "waits for its result"
        return f"<code>{type(self).__name__}</code>: {self._summary()}; <code>.result()</code> {then}"

    def _summary(self) -> str:
        if not self.done():
            return "pending"
        if self.cancelled():
            return "cancelled"
        error = super().exception()
        return "done" if error is None else f"failed with {type(error).__name__}"

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Says what was forgotten where a result's attribute is read from its future."""
            message = f"{type(self).__name__!r} object has no attribute {name!r}"
            if not name.startswith("_"):
                message += f"; it is a future: read it from the result, as future.result().{name} or (await future).{name}"
            raise AttributeError(message)

        def __getitem__(self, key: Any) -> Any:
            """Says the same where a result's item is read from its future, also by iterating over it."""
            raise TypeError(
                f"{type(self).__name__!r} object has no items; it is a future: read them from the result, as "
                f"future.result()[{key!r}] or (await future)[{key!r}]"
            )


def _call_when_done(future: Future[T], function: Callable[[Future[T]], object]) -> None:
    # isinstance() of an abstract class would cost more than the lookup, in every await.
    getattr(future, "call_when_done", future.add_done_callback)(function)


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
    _call_when_done(future, functools.partial(notifier.notify, ready))
    try:
        await ready
    except asyncio.CancelledError:
        if propagate_cancel:
            future.cancel()
        raise
    if future.cancelled():
        raise asyncio.CancelledError
    return future.result()
