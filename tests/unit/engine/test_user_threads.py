"""Long jobs of users run on threads, one of each user at a time."""

from __future__ import annotations

import threading
from contextvars import ContextVar

import pytest

from tinkex.engine.user_threads import UserThreads
from tinkex.errors import ModelUnavailable

COLOUR: ContextVar[str] = ContextVar("COLOUR", default="none")


def test_users_take_turns_with_one_job_each() -> None:
    threads = UserThreads(1, "test")
    started, go_on = threading.Event(), threading.Event()
    order: list[str] = []

    def first() -> None:
        started.set()
        assert go_on.wait(60)

    futures = [threads.submit("ada", first)]
    assert started.wait(60)
    futures += [threads.submit("ada", lambda: order.append("ada")) for _ in range(3)]
    cancelled = threads.submit("ada", lambda: order.append("cancelled"))
    cancelled.cancel()
    futures.append(threads.submit("bob", lambda: order.append("bob")))
    go_on.set()
    for future in futures:
        future.result(60)
    assert order == ["bob", "ada", "ada", "ada"]


def test_an_error_of_a_job_goes_to_its_caller_and_the_thread_runs_the_next() -> None:
    threads = UserThreads(2, "test")
    with pytest.raises(ZeroDivisionError):
        threads.submit("ada", lambda: 1 // 0).result(60)
    assert threads.submit("ada", lambda: 7).result(60) == 7


def test_a_job_has_the_context_of_its_caller() -> None:
    threads = UserThreads(1, "test")
    token = COLOUR.set("red")
    try:
        assert threads.submit("ada", COLOUR.get).result(60) == "red"
    finally:
        COLOUR.reset(token)


def test_jobs_that_wait_fail_at_the_end_and_the_running_one_completes() -> None:
    threads = UserThreads(1, "test")
    started, go_on = threading.Event(), threading.Event()

    def first() -> int:
        started.set()
        assert go_on.wait(60)
        return 7

    running = threads.submit("ada", first)
    assert started.wait(60)
    waiting = [threads.submit("ada", lambda: 1), threads.submit("bob", lambda: 2)]
    closing = threading.Thread(target=threads.shutdown)
    closing.start()
    for future in waiting:
        with pytest.raises(ModelUnavailable, match="closed"):
            future.result(60)
    go_on.set()
    closing.join(60)
    assert running.result(60) == 7
    with pytest.raises(ModelUnavailable, match="closed"):
        threads.submit("ada", lambda: 3)
