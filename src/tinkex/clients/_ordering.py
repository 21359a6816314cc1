"""The order of submissions: operations of one run get their numbers when they are called, and are submitted in that order."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self, TypeAlias, TypeVar

from tinkex._runtime import AwaitableConcurrentFuture, await_future, background

__all__ = ["OperationHolds", "Send", "Sequencer", "Submission"]

T = TypeVar("T")

Send: TypeAlias = Callable[[], Coroutine[Any, Any, None]]
"""Submits the operations of a submission, in its turn."""


class Submission:
    """The operations numbered ``seq_ids``, to be submitted once all earlier ones have been.

    Used as ``async with submission:`` on the background loop. However the block ends, the next submission follows.
    """

    def __init__(self, seq_ids: range, predecessor: Submission | None) -> None:
        self.seq_ids = seq_ids
        self.predecessor = predecessor
        self.done = asyncio.Event()
        self.cancelled_successor: Submission | None = None
        """The next submission, if it was cancelled while it waited for this one."""
        self.send: Send | None = None
        """Submits it; None as soon as it has started."""
        self.context = contextvars.copy_context()
        """The context of the call, in whatever task it is sent."""

    async def __aenter__(self) -> Self:
        if self.predecessor is not None:
            try:
                await self.predecessor.done.wait()
            except asyncio.CancelledError:
                # Cancelled while waiting, it keeps its place: the next one still waits for the earlier ones.
                self.predecessor.cancelled_successor = self
                if self.predecessor.done.is_set():
                    self._finish()
                raise
            self.predecessor = None  # finished submissions must not keep all earlier ones in memory
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._finish()

    def _finish(self) -> None:
        submission: Submission | None = self
        while submission is not None:
            submission.done.set()
            submission = submission.cancelled_successor


class Sequencer:
    """Assigns sequence numbers; thread-safe.

    >>> sequencer = Sequencer()
    >>> async def send() -> None: ...
    >>> sequencer.add(2, lambda submission: send)
    >>> [submission.seq_ids for submission in sequencer.unsent()]
    [range(1, 3)]
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: Submission | None = None

    def add(self, count: int, prepare: Callable[[Submission], Send]) -> None:
        """Queues a submission with the next ``count`` numbers; the first number of a run is 1.

        ``prepare`` makes the requests ready. If it raises, no number is used: servers wait for a number
        that never comes.
        """
        with self._lock:
            last = self._last
            first = 1 if last is None else last.seq_ids.stop
            submission = Submission(range(first, first + count), last)
            submission.send = prepare(submission)
            # One step takes the numbers and queues the submission: an interrupt finds both done, or neither.
            self._last = submission

    def unsent(self) -> list[Submission]:
        """The queued submissions that have not started, in order; called on the background loop."""
        submissions = []
        submission = self._last
        while submission is not None and submission.send is not None:
            submissions.append(submission)
            submission = submission.predecessor
        return submissions[::-1]


class _Hold:
    """An operation of several steps in flight, and the calls that were made after it and wait for its last step."""

    def __init__(self, previous: _Hold | None) -> None:
        self.previous = previous
        self.calls: list[tuple[Callable[[], Any], AwaitableConcurrentFuture[Any]]] = []
        self.released = asyncio.Event()


class OperationHolds:
    """Puts off operations while an earlier one, such as a pass with a custom loss, has not submitted its last step; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holds: list[_Hold] = []

    def hold(
        self, steps: Callable[[], Coroutine[Any, Any, AwaitableConcurrentFuture[T]]]
    ) -> AwaitableConcurrentFuture[T]:
        """Starts an operation of several steps on the background loop; ``steps`` returns the future of the last one.

        Operations that are called from now on follow that step.
        """
        with self._lock:
            hold = _Hold(self._holds[-1] if self._holds else None)
            self._holds.append(hold)
        return background().submit(self._run(hold, steps), lambda _: self._release(hold))

    async def _run(
        self, hold: _Hold, steps: Callable[[], Coroutine[Any, Any, AwaitableConcurrentFuture[T]]]
    ) -> T:
        if hold.previous is not None:
            await hold.previous.released.wait()
        _is_step.set(True)
        try:
            last = await steps()
        finally:
            self._release(hold)
        return await await_future(last, propagate_cancel=True)

    def put_off(
        self, start: Callable[[], AwaitableConcurrentFuture[T]]
    ) -> AwaitableConcurrentFuture[T] | None:
        """The future of an operation that starts later; None if it can start now."""
        if not self._holds or _is_step.get():
            return None
        with self._lock:
            if not self._holds:
                return None
            call: AwaitableConcurrentFuture[T] = AwaitableConcurrentFuture()
            self._holds[-1].calls.append((functools.partial(contextvars.copy_context().run, start), call))
            return call

    def _release(self, hold: _Hold) -> None:
        with self._lock:
            if hold not in self._holds:
                return
            if hold.previous in self._holds:  # it was cancelled while it waited: the earlier one comes first
                hold.previous.calls += hold.calls
                for later in self._holds:
                    later.previous = hold.previous if later.previous is hold else later.previous
            else:
                for start, call in hold.calls:
                    call.run(start)
            self._holds.remove(hold)
            hold.previous = None
        background().call(hold.released.set)


_is_step: contextvars.ContextVar[bool] = contextvars.ContextVar("tinkex_is_step", default=False)
"""Whether the code runs as a step of a held operation, which is not put off."""
