"""A lane: a thread that drives one backend, one job at a time, and reports to the engine's loop."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from tinkex.engine.lanes.interface import Backend

T = TypeVar("T")


class Inbox:
    """Calls for one thread. Any thread may put them there; the owner takes and makes them.

    >>> inbox = Inbox()
    >>> doubled = inbox.call(lambda: 2 * 21)
    >>> for call in inbox.take(timeout=60):
    ...     call()
    >>> doubled.result()
    42
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._awake = False
        self.num_wake_ups = 0
        """How many wake-ups the owner has taken."""

    def put(self, call: Callable[[], None]) -> None:
        """Make a call on the owner's thread."""
        self._calls.put(call)

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Call a function on the owner's thread; the future has what it returns or raises."""
        future: Future[T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:  # noqa: BLE001 -- raised where the result is awaited
                    future.set_exception(error)

        self._calls.put(run)
        return future

    def wake(self) -> None:
        """Have the owner look for something to do; cheap."""
        if not self._awake:
            self._awake = True
            self._calls.put(None)

    def take(self, timeout: float) -> Iterator[Callable[[], None]]:
        """The calls that have arrived; waits for the first, or for a wake-up, until the time is over."""
        try:
            call = self._calls.get(timeout=timeout) if timeout > 0 else self._calls.get_nowait()
            while True:
                if call is None:
                    # Before anything is looked at: a wake-up from now on is a new one.
                    self._awake = False
                    self.num_wake_ups += 1
                else:
                    yield call
                call = self._calls.get_nowait()
        except queue.Empty:
            return


class Job(Protocol):
    """Something a lane computes."""

    def run(self, lane: Lane) -> Any:
        """Compute it, on the lane's thread; the result is reported."""
        ...


@dataclass(frozen=True)
class Report:
    """How a job ended: its result, or its error, which is ``WorkerLost`` if the lane was lost."""

    lane: Lane
    job: Job
    result: Any = None
    error: Exception | None = None


class Lane:
    """Runs jobs on a backend, in a thread of its own.

    ``dispatch`` and ``busy`` are only used by the engine's loop; ``call`` is safe on any thread.

    Example:
        >>> lane = Lane("lane-0", backend, on_report=reports.put)
        >>> lane.dispatch(job)
        >>> report = reports.get()
    """

    def __init__(self, name: str, backend: Backend, on_report: Callable[[Report], None]) -> None:
        self.name = name
        self.backend = backend
        self.busy = False
        """Whether a job is dispatched whose report has not been collected."""
        self.is_wanted = False
        """Whether something waits for the lane: a job of several steps reports after the current one."""
        self._on_report = on_report
        self._inbox = Inbox()
        self._closing = False
        self._calling = threading.Lock()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name=f"tinkex-{name}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Finish what is dispatched, and end the thread."""
        self._closing = self.is_wanted = True
        self._inbox.wake()
        if self._thread.is_alive():
            self._thread.join()

    def dispatch(self, job: Job) -> None:
        """Run a job; its report follows."""
        assert not self.busy, "a lane runs one job at a time"
        self.busy, self.is_wanted = True, False
        self._inbox.put(lambda: self._execute(job))

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run a function on the lane's thread between two jobs, or on this one if the lane has ended."""
        with self._calling:
            inbox = Inbox() if self._ended else self._inbox
            future = inbox.call(function)
        self.is_wanted = True
        if inbox is not self._inbox:
            _make_calls(inbox, 0)
        return future

    def _execute(self, job: Job) -> None:
        try:
            report = Report(self, job, result=job.run(self))
        except Exception as error:  # noqa: BLE001 -- the loop decides what it means
            report = Report(self, job, error=error)
        self._on_report(report)

    def _run(self) -> None:
        closing = False
        while not closing:
            closing = self._closing
            _make_calls(self._inbox, 0 if closing else threading.TIMEOUT_MAX)
        with self._calling:
            self._ended = True
        _make_calls(self._inbox, 0)


def _make_calls(inbox: Inbox, timeout: float) -> None:
    for call in inbox.take(timeout):
        call()
