"""The inbox of the engine's loop: reports of lanes, calls from other threads, and wake-ups, on one queue."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from tinkex.engine.lanes.lane import Report, settle

T = TypeVar("T")


@dataclass(frozen=True)
class LoopCall:
    """A function to run on the engine thread."""

    function: Callable[[], Any]
    future: Future[Any]

    def run(self) -> None:
        """Run it, and set its result."""
        settle(self.future, self.function)


Item: TypeAlias = Report | LoopCall


class Inbox:
    """What the loop waits for. Any thread may put; the engine thread takes.

    >>> inbox = Inbox()
    >>> inbox.wake(); inbox.take(timeout=60)
    []
    """

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._awake = False

    def put(self, report: Report) -> None:
        """Deliver a report."""
        self._items.put(report)

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run a function on the engine thread."""
        future: Future[T] = Future()
        self._items.put(LoopCall(function, future))
        return future

    def wake(self) -> None:
        """Have the loop look for something to do; cheap, from any thread."""
        if not self._awake:
            self._awake = True
            self._items.put(None)

    def take(self, timeout: float) -> list[Item]:
        """Everything that has arrived; waits for the first item until the time is over."""
        items: list[Item] = []
        try:
            item = self._items.get(timeout=timeout) if timeout > 0 else self._items.get_nowait()
            while True:
                if item is None:
                    # Before anything is looked at: a wake-up from now on is a new one.
                    self._awake = False
                else:
                    items.append(item)
                item = self._items.get_nowait()
        except queue.Empty:
            return items
