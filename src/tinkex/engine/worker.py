"""The engine thread: all computation happens on it, one step after the other."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

logger = logging.getLogger("tinkex.engine")

T = TypeVar("T")

AFTER_A_FAILURE_S = 1.0


class Worker:
    """Runs ``step`` as long as it has something to do, and sleeps until woken when it has not.

    ``step`` says whether it did anything; ``patience`` says how long to sleep at most.
    """

    def __init__(self, step: Callable[[], bool], patience: Callable[[], float]) -> None:
        self._step = step
        self._patience = patience
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._awake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="tinkex-engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Say that there may be something to do; cheap, from any thread."""
        self._awake.set()

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run a function on the engine thread, between two steps."""
        future: Future[T] = Future()
        self._calls.append((function, future))
        self.wake()
        return future

    def stop(self) -> None:
        """Finish the step under way, then end the thread."""
        self._stopping = True
        self.wake()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        while self._calls:
            self._calls.popleft()[1].cancel()

    def _run(self) -> None:
        while not self._stopping:
            self._awake.clear()
            self._run_calls()
            patience = AFTER_A_FAILURE_S
            try:
                patience = 0.0 if self._step() else self._patience()
            except Exception:
                # The thread must live on, or every client would hang.
                logger.exception("the engine failed between two operations")
            if patience > 0 and not self._stopping:
                self._awake.wait(patience)

    def _run_calls(self) -> None:
        while self._calls:
            function, future = self._calls.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001 -- handed to the caller, who raises it
                future.set_exception(error)
