"""Runs the callbacks of a program on threads of their own, so that a slow one delays no other client.

All clients of a process share one event loop. A user's sink, queue observer or done-callback is therefore put into the queue
of its client, whose thread calls it in order. The thread starts with the first callback and ends when there is none for a
while; a client without callbacks has no thread.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import Context, ContextVar
from typing import TYPE_CHECKING, Any

from tinkex.observability.events import (
    CallbackFailed,
    CallbacksDropped,
    CallbackSlow,
    GuardedSink,
    LogSink,
    guard,
)

if TYPE_CHECKING:
    from tinkex.observability.events import Event, Sink

__all__ = [
    "MAX_PROCESS_WAIT_S",
    "MAX_QUEUED",
    "MAX_WAIT_S",
    "SLOW_S",
    "CallbackQueue",
    "QueuedSink",
    "deliver",
    "delivered_before_errors",
    "drain",
    "expect_callbacks",
    "follow_deliveries",
    "queue_for",
    "queued",
    "undelivered",
]

MAX_QUEUED = 10_000
"""Events that wait for one slow sink; further ones are dropped and counted."""
SLOW_S = 1.0
"""A callback that runs longer is reported as slow."""
MAX_WAIT_S = 1.0
"""How long the result of a call waits until the sink of its client has received the call's events."""
MAX_PROCESS_WAIT_S = 0.1
"""The same for a sink of the whole process, which must not delay the clients of others."""
IDLE_S = 5.0
"""How long a thread without callbacks lives."""


class CallbackQueue:
    """Calls functions one after the other on a thread of its own.

    >>> queue, called = CallbackQueue(), threading.Event()
    >>> queue.put("example", called.set)
    True
    >>> called.wait(10)
    True
    """

    def __init__(
        self,
        *,
        max_queued: int = MAX_QUEUED,
        slow_s: float = SLOW_S,
        max_wait_s: float = MAX_WAIT_S,
        log: Sink | None = None,
    ) -> None:
        self.max_wait_s = max_wait_s
        """How long the result of a call waits for its events that are in this queue."""
        self._max_queued = max_queued
        self._slow_s = slow_s
        self._log = log
        """Where failed, slow and dropped callbacks are reported; None is the log."""
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._items: deque[tuple[str, Callable[..., object], tuple[Any, ...]]] = deque()
        self._wake = threading.Condition()
        self._running = self._idle = False
        self._thread_id: int | None = None
        self._began: float | None = None
        """When the callback that runs now began."""
        self._reported_slow = False
        self.num_dropped = 0
        """Events that were not delivered, because the queue was full."""
        self.behind = False
        """Whether a call has waited in vain for its events to be delivered, until the queue is empty again."""

    @property
    def is_of_this_process(self) -> bool:
        """Whether its thread is not that of the process that this one was forked from."""
        return self._pid == os.getpid()

    @property
    def is_current_thread(self) -> bool:
        """Whether the caller is a callback of this queue."""
        return self._thread_id == threading.get_ident()

    @property
    def pending(self) -> bool:
        """Whether a callback runs or waits."""
        return bool(self._items)

    def put(self, name: str, function: Callable[..., object], *args: Any, droppable: bool = True) -> bool:
        """Calls a function later; returns False if the queue is full and it was dropped."""
        if self._pid != os.getpid():
            self._reset()  # a forked child has none of its parent's threads
        began = self._began
        if began is not None and not self._reported_slow and time.monotonic() - began > self._slow_s:
            self._report_slow(self._items[0][0] if self._items else name, time.monotonic() - began)
        if droppable and len(self._items) >= self._max_queued:
            self.num_dropped += 1
            if self.num_dropped & (self.num_dropped - 1) == 0:  # 1, 2, 4, 8 …
                self._report(CallbacksDropped(name, self.num_dropped))
            return False
        self._items.append((name, function, args))
        if self._idle or not self._running:
            with self._wake:
                if self._running:
                    self._wake.notify()
                else:
                    try:
                        threading.Thread(target=self._run, name="tinkex callbacks", daemon=True).start()
                    except RuntimeError:  # the interpreter exits, or may not start another thread
                        self._items.clear()
                        return False
                    self._running = True
                    _started.add(self)
        return True

    def drain(self, deadline: float) -> None:
        """Waits until every queued callback has been called, or until ``deadline``; returns immediately in a callback."""
        while self.pending and self.is_of_this_process and not self.is_current_thread:
            if time.monotonic() >= deadline:
                return
            time.sleep(0.001)

    def _run(self) -> None:
        self._thread_id = threading.get_ident()
        while True:
            while self._items:
                self._call(*self._items[0])
                self._items.popleft()  # only now: a wait for deliveries includes the running one
            self.behind = False
            with self._wake:
                self._idle = True
                while not self._items:
                    if not self._wake.wait(IDLE_S) and not self._items:
                        self._running, self._thread_id = False, None
                        return  # idle stays set: the next put takes the lock and starts another thread
                self._idle = False

    def _call(self, name: str, function: Callable[..., object], args: tuple[Any, ...]) -> None:
        self._reported_slow = False
        self._began = began = time.monotonic()
        try:
            function(*args)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - reported; the next callback is called
            self._report(CallbackFailed(name, f"{type(error).__name__}: {error}"))
        self._began = None
        elapsed_s = time.monotonic() - began
        if elapsed_s > self._slow_s and not self._reported_slow:
            self._report_slow(name, elapsed_s)

    def _report_slow(self, name: str, elapsed_s: float) -> None:
        self._reported_slow = True
        self._report(CallbackSlow(name, elapsed_s))

    def _report(self, event: Event) -> None:
        if self._log is None:
            self._log = LogSink()
        self._log.emit(event)


_started: weakref.WeakSet[CallbackQueue] = weakref.WeakSet()


def drain(timeout_s: float) -> None:
    """Waits until every queued callback has been called, for a bounded time; for the end of the program."""
    deadline = time.monotonic() + timeout_s
    for queue in list(_started):
        queue.drain(deadline)


class QueuedSink:
    """A user's sink that receives its events on the thread of a queue."""

    def __init__(self, sink: GuardedSink, queue: CallbackQueue) -> None:
        expect_callbacks()
        self._sink = sink
        self.queue = queue

    def emit(self, event: Event) -> None:
        """Queues one event."""
        deliver(self.queue, self._sink.name, self._sink.emit, event)


def queued(sink: Sink | None, max_wait_s: float = MAX_WAIT_S) -> Sink:
    """Wraps a user's sink so that it is called on a thread of its own; the log and metrics, which are fast, are not.

    Clients that share a sink share its queue, so that it is never called by two threads at a time. The result of a call waits
    for its events for at most ``max_wait_s``.
    """
    if isinstance(sink, QueuedSink):
        return sink
    metrics: Any = sys.modules.get("tinkex.observability.metrics")
    counting: Any = sink
    if metrics is not None and type(counting) is metrics.MetricsSink:
        forwarded: Sink = metrics.MetricsSink(counting.metrics, then=queued(counting.then, max_wait_s))
        return forwarded
    guarded = guard(sink)
    if not isinstance(guarded, GuardedSink):
        return guarded
    queue = _queue_of(sink)
    queue.max_wait_s = min(queue.max_wait_s, max_wait_s)
    return QueuedSink(guarded, queue)


_lock = threading.Lock()
_queues: weakref.WeakKeyDictionary[Any, CallbackQueue] = weakref.WeakKeyDictionary()


def _queue_of(sink: object) -> CallbackQueue:
    try:
        with _lock:
            return _queues.setdefault(sink, CallbackQueue())
    except TypeError:  # it cannot be hashed, or referred to weakly
        return CallbackQueue()


def queue_for(sink: Sink | None) -> CallbackQueue:
    """The queue for other callbacks of a client with this sink: that of the sink, so that all of them are in order."""
    return sink.queue if isinstance(sink, QueuedSink) else CallbackQueue()


# ---- delivery before results ----

_in_use = False
"""Whether there is a queued sink in this process; without one, calls do not look for undelivered events."""
_deliveries: ContextVar[set[CallbackQueue]] = ContextVar("tinkex_deliveries")
"""The queues that hold events of the current call."""


def expect_callbacks() -> None:
    """Makes later calls of this process record their deliveries; called when a user registers a sink or an observer."""
    global _in_use  # noqa: PLW0603 - a fact about the process
    _in_use = True


def deliver(queue: CallbackQueue, name: str, function: Callable[..., object], *args: Any) -> None:
    """Queues a callback that belongs to the current call, whose result waits for it for a short time."""
    deliveries = _deliveries.get(None)
    if deliveries is not None:
        deliveries.add(queue)
    queue.put(name, function, *args)


def follow_deliveries(context: Context) -> None:
    """Records from now on which queues hold events of the call that runs in this context."""
    if _in_use:
        context.run(_deliveries.set, set())


@contextlib.contextmanager
def delivered_before_errors() -> Iterator[None]:
    """Raises an error of the block after sinks have received the block's events, as the result of a call does.

    The wait is as short as that of a result, and blocks the thread.
    """
    if not _in_use:
        yield
        return
    deliveries: set[CallbackQueue] = set()
    token = _deliveries.set(deliveries)
    try:
        yield
    except BaseException:
        for queue in deliveries:
            if not queue.behind:
                queue.drain(time.monotonic() + queue.max_wait_s)
                queue.behind = queue.pending
        raise
    finally:
        _deliveries.reset(token)


def undelivered(context: Context) -> list[CallbackQueue]:
    """The queues with events of a call that its sinks have not received; without those that are known to be behind."""
    if not _in_use:
        return []
    return [queue for queue in context.get(_deliveries) or () if queue.pending and not queue.behind]
