"""A lane: a thread that drives one backend, one job at a time, and reports to the engine's loop."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from tinkex.engine.lanes.interface import Backend, ModelInfo, WorkerLost

T = TypeVar("T")


class Job(Protocol):
    """Something a lane computes."""

    def run(self, lane: Lane) -> Any:
        """Compute it, on the lane's thread; the result is reported."""
        ...


@dataclass(frozen=True)
class Report:
    """How a job ended: its result, its error, or the loss of the lane."""

    lane: Lane
    job: Job
    result: Any = None
    error: Exception | None = None

    @property
    def lost(self) -> WorkerLost | None:
        """The loss of the lane, if that is how the job ended."""
        return self.error if isinstance(self.error, WorkerLost) else None


class Lane:
    """Runs jobs on a backend, in a thread of its own.

    ``dispatch`` and ``busy`` are only used by the engine's loop, ``load`` only by jobs; ``call`` is safe on any thread.

    Example:
        >>> lane = Lane("lane-0", backend, on_report=inbox.put)
        >>> lane.dispatch(job)
        >>> report = inbox.get()
    """

    def __init__(self, name: str, backend: Backend, on_report: Callable[[Report], None]) -> None:
        self.name = name
        self.backend = backend
        self.busy = False
        """Whether a job is dispatched whose report has not been collected."""
        self._on_report = on_report
        self._loaded: dict[str, ModelInfo] = {}
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"tinkex-{name}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Finish what is dispatched, and end the thread."""
        self._jobs.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def dispatch(self, job: Job) -> None:
        """Run a job; its report follows."""
        assert not self.busy, "a lane runs one job at a time"
        self.busy = True
        self._jobs.put(lambda: self._on_report(self._execute(job)))

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run a function on the lane's thread between two jobs."""
        future: Future[T] = Future()
        self._jobs.put(lambda: settle(future, function))
        return future

    def load(self, source: str) -> ModelInfo:
        """Load a base model on this lane, if it is not loaded."""
        info = self._loaded.get(source)
        if info is None:
            info = self._loaded[source] = self.backend.load(source)
        return info

    def forget_models(self) -> None:
        """Note that no base model is loaded on this lane any more."""
        self._loaded.clear()

    def _execute(self, job: Job) -> Report:
        try:
            return Report(self, job, result=job.run(self))
        except Exception as error:  # noqa: BLE001 -- the loop decides what it means
            return Report(self, job, error=error)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


def settle(future: Future[T], function: Callable[[], T]) -> None:
    """Run a function, and set the result of a future to what it returns or raises."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except BaseException as error:  # noqa: BLE001 -- raised where the result is awaited
        future.set_exception(error)
