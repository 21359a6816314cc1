from __future__ import annotations

import queue
import threading
from dataclasses import dataclass
from typing import Any

import pytest

from tinkex.engine.lanes.interface import WorkerLost
from tinkex.engine.lanes.lane import Inbox, Lane, Report

PATIENCE_S = 60.0

Reports = queue.SimpleQueue[Report]


@dataclass(frozen=True)
class Work:
    """A job that returns, raises, or waits."""

    result: Any = None
    error: Exception | None = None
    until: threading.Event | None = None

    def run(self, lane: Lane) -> Any:
        if self.until is not None:
            assert self.until.wait(PATIENCE_S)
        if self.error is not None:
            raise self.error
        return self.result, lane.name, threading.current_thread().name


@pytest.fixture
def inbox() -> Inbox:
    return Inbox()


@pytest.fixture
def reports() -> Reports:
    return queue.SimpleQueue()


@pytest.fixture
def lane(reports: Reports) -> Any:
    made = Lane("lane-7", None, reports.put)  # type: ignore[arg-type]
    made.start()
    yield made
    made.close()


def test_a_job_runs_on_the_lanes_thread_and_its_result_is_reported(lane: Lane, reports: Reports) -> None:
    job = Work("result")
    lane.dispatch(job)
    assert lane.busy
    report = reports.get(timeout=PATIENCE_S)
    assert (report.lane, report.job, report.error) == (lane, job, None)
    assert report.result == ("result", "lane-7", "tinkex-lane-7")


def test_errors_and_the_loss_of_the_worker_are_reported(lane: Lane, reports: Reports) -> None:
    for error in (ZeroDivisionError("no"), WorkerLost("it crashed", own_fault=True)):
        lane.busy = False
        lane.dispatch(Work(error=error))
        report = reports.get(timeout=PATIENCE_S)
        assert report.error is error


def test_a_lane_runs_one_job_at_a_time(lane: Lane, reports: Reports) -> None:
    release = threading.Event()
    lane.dispatch(Work(until=release))
    with pytest.raises(AssertionError, match="one job at a time"):
        lane.dispatch(Work())
    release.set()
    reports.get(timeout=PATIENCE_S)


def test_calls_run_between_jobs_and_return_their_value_or_error(lane: Lane, reports: Reports) -> None:
    release, order = threading.Event(), list[str]()
    lane.dispatch(Work(until=release))
    called = lane.call(lambda: order.append("call"))
    failing = lane.call(lambda: 1 / 0)
    assert not called.done()
    release.set()
    called.result(PATIENCE_S)
    with pytest.raises(ZeroDivisionError):
        failing.result(PATIENCE_S)
    assert reports.get(timeout=PATIENCE_S).error is None, "the job ended before"


def test_a_job_of_several_steps_learns_that_something_waits_for_the_lane(
    lane: Lane, reports: Reports
) -> None:
    release = threading.Event()
    lane.dispatch(Work(until=release))
    assert not lane.is_wanted
    called = lane.call(lambda: 42)
    assert lane.is_wanted
    release.set()
    assert called.result(PATIENCE_S) == 42
    lane.busy = False
    lane.dispatch(Work())
    assert not lane.is_wanted


def test_closing_finishes_what_is_dispatched(reports: Reports) -> None:
    lane = Lane("lane-0", None, reports.put)  # type: ignore[arg-type]
    lane.start()
    release = threading.Event()
    lane.dispatch(Work("kept", until=release))
    closing = threading.Thread(target=lane.close)
    closing.start()
    release.set()
    closing.join(PATIENCE_S)
    assert reports.get(timeout=PATIENCE_S).result[0] == "kept"


def test_an_inbox_returns_all_queued_calls(inbox: Inbox) -> None:
    assert list(inbox.take(0)) == []
    future = inbox.call(lambda: 42)
    inbox.wake()
    inbox.wake()
    (call,) = inbox.take(PATIENCE_S)
    call()
    assert future.result(0) == 42
    assert list(inbox.take(0)) == []


def test_calls_that_were_not_taken_stay_in_the_inbox(inbox: Inbox) -> None:
    made = list[int]()
    inbox.put(lambda: made.append(1))
    inbox.put(lambda: made.append(2))
    next(inbox.take(0))
    for call in inbox.take(0):
        call()
    assert made == [2]


def test_a_wake_up_is_never_lost(inbox: Inbox) -> None:
    woken = threading.Event()

    def wait() -> None:
        assert list(inbox.take(PATIENCE_S)) == []
        woken.set()

    for _ in range(200):
        waiting = threading.Thread(target=wait)
        waiting.start()
        inbox.wake()
        assert woken.wait(PATIENCE_S)
        woken.clear()
        waiting.join()


def test_a_call_that_was_cancelled_does_not_run(inbox: Inbox) -> None:
    ran = list[int]()
    future = inbox.call(lambda: ran.append(1))
    future.cancel()
    (call,) = inbox.take(0)
    call()
    assert ran == []


def test_a_call_of_a_lane_that_has_ended_is_made_on_the_thread_of_the_caller(lane: Lane) -> None:
    lane.close()
    assert lane.call(threading.current_thread).result(0) is threading.current_thread()
