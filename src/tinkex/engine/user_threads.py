"""Threads for work that would block the event loop: one job per user at a time, and users take turns."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

from tinkex.errors import ModelUnavailable

T = TypeVar("T")


class UserThreads:
    """Runs one job per user at a time, and a few of all users, so that a user waits for at most one job of another.

    Safe on any thread. A job has the context variables of its caller.

    >>> threads = UserThreads(2, "tinkex-decode")
    >>> threads.submit("ada", lambda: 6 * 7).result()
    42
    """

    def __init__(self, max_threads: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(max_threads, thread_name_prefix=name)
        self._lock = threading.Lock()
        self._waiting: dict[str, deque[tuple[Callable[[], Any], Future[Any]]]] = {}
        """What waits behind the job of each user that has one."""
        self._closed = False

    def submit(self, owner: str, job: Callable[[], T]) -> Future[T]:
        """Run a job for a user; a future that is cancelled before its turn is skipped."""
        future: Future[T] = Future()
        job = partial(copy_context().run, job)
        with self._lock:
            if self._closed:
                raise _closed()
            waiting = self._waiting.get(owner)
            if waiting is None:
                self._waiting[owner] = deque([(job, future)])
                self._threads.submit(self._run_next, owner)
            else:
                waiting.append((job, future))
        return future

    def shutdown(self) -> None:
        """Wait for the jobs that run; those that wait fail."""
        with self._lock:
            self._closed = True
            dropped = [future for waiting in self._waiting.values() for _, future in waiting]
            self._waiting = {owner: deque() for owner in self._waiting}
        for future in dropped:
            if future.set_running_or_notify_cancel():
                future.set_exception(_closed())
        self._threads.shutdown()

    def _run_next(self, owner: str) -> None:
        with self._lock:
            if not self._waiting[owner]:  # it was shut down before the first job began
                return
            job, future = self._waiting[owner].popleft()
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(job())
            except BaseException as error:  # noqa: BLE001 -- nothing is hidden: the future raises it
                future.set_exception(error)
        del job, future  # or an idle thread would keep a body in memory
        with self._lock:
            if self._waiting[owner]:
                self._threads.submit(self._run_next, owner)  # behind the other users
            else:
                del self._waiting[owner]


def _closed() -> ModelUnavailable:
    return ModelUnavailable("this engine is closed; start it again.")
