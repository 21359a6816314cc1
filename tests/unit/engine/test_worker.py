from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tinkex.engine.worker import Worker


@contextmanager
def running(worker: Worker) -> Iterator[Worker]:
    worker.start()
    try:
        yield worker
    finally:
        worker.stop()


def test_steps_run_while_there_is_something_to_do_and_again_when_woken() -> None:
    todo, done, idle = [3, 2, 1], list[int](), threading.Event()

    def step() -> bool:
        if not todo:
            idle.set()
            return False
        done.append(todo.pop())
        return True

    with running(Worker(step, lambda: 60.0)) as worker:
        assert idle.wait(10)
        assert done == [1, 2, 3]
        idle.clear()
        todo.append(4)
        worker.wake()
        assert idle.wait(10)
    assert done == [1, 2, 3, 4]


def test_calls_run_on_the_engine_thread_and_return_their_value_or_error() -> None:
    def fail() -> None:
        raise ZeroDivisionError("no")

    with running(Worker(lambda: False, lambda: 60.0)) as worker:
        assert worker.call(lambda: threading.current_thread().name).result(10) == "tinkex-engine"
        with pytest.raises(ZeroDivisionError):
            worker.call(fail).result(10)


def test_a_failing_step_does_not_end_the_thread(caplog: pytest.LogCaptureFixture) -> None:
    failures = [ZeroDivisionError("first")]

    def step() -> bool:
        if failures:
            raise failures.pop()
        return False

    with caplog.at_level(logging.CRITICAL), running(Worker(step, lambda: 60.0)) as worker:
        assert worker.call(lambda: 1).result(10) == 1
        assert worker.call(lambda: 2).result(10) == 2


def test_calls_that_never_ran_are_cancelled_at_the_end() -> None:
    worker = Worker(lambda: False, lambda: 60.0)
    call = worker.call(lambda: 1)
    worker.stop()
    assert call.cancelled()
