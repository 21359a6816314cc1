from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import pytest

from tinkex.engine.inbox import Inbox, LoopCall
from tinkex.engine.lanes.interface import WorkerLost
from tinkex.engine.lanes.lane import Lane, Report

PATIENCE_S = 60.0


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
def lane(inbox: Inbox) -> Any:
    made = Lane("lane-7", None, inbox.put)  # type: ignore[arg-type]
    made.start()
    yield made
    made.close()


def report_of(inbox: Inbox) -> Report:
    (report,) = inbox.take(PATIENCE_S)
    assert isinstance(report, Report)
    return report


def test_a_job_runs_on_the_lanes_thread_and_its_result_is_reported(lane: Lane, inbox: Inbox) -> None:
    job = Work("result")
    lane.dispatch(job)
    assert lane.busy
    report = report_of(inbox)
    assert (report.lane, report.job, report.error, report.lost) == (lane, job, None, None)
    assert report.result == ("result", "lane-7", "tinkex-lane-7")


def test_errors_are_reported_and_a_lost_worker_is_distinguished(lane: Lane, inbox: Inbox) -> None:
    for error in (ZeroDivisionError("no"), WorkerLost("it crashed", own_fault=True)):
        lane.busy = False
        lane.dispatch(Work(error=error))
        report = report_of(inbox)
        assert report.error is error
        assert report.lost is (error if isinstance(error, WorkerLost) else None)


def test_a_lane_runs_one_job_at_a_time(lane: Lane, inbox: Inbox) -> None:
    release = threading.Event()
    lane.dispatch(Work(until=release))
    with pytest.raises(AssertionError, match="one job at a time"):
        lane.dispatch(Work())
    release.set()
    report_of(inbox)


def test_calls_run_between_jobs_and_return_their_value_or_error(lane: Lane, inbox: Inbox) -> None:
    release, order = threading.Event(), list[str]()
    lane.dispatch(Work(until=release))
    called = lane.call(lambda: order.append("call"))
    failing = lane.call(lambda: 1 / 0)
    assert not called.done()
    release.set()
    called.result(PATIENCE_S)
    with pytest.raises(ZeroDivisionError):
        failing.result(PATIENCE_S)
    assert report_of(inbox).error is None, "the job ended before"


def test_closing_finishes_what_is_dispatched(inbox: Inbox) -> None:
    lane = Lane("lane-0", None, inbox.put)  # type: ignore[arg-type]
    lane.start()
    release = threading.Event()
    lane.dispatch(Work("kept", until=release))
    closing = threading.Thread(target=lane.close)
    closing.start()
    release.set()
    closing.join(PATIENCE_S)
    assert report_of(inbox).result[0] == "kept"


def test_an_inbox_returns_all_queued_items(inbox: Inbox) -> None:
    assert inbox.take(0) == []
    future = inbox.call(lambda: 42)
    inbox.wake()
    inbox.wake()
    (call,) = inbox.take(PATIENCE_S)
    assert isinstance(call, LoopCall)
    call.run()
    assert future.result(0) == 42
    assert inbox.take(0) == []


def test_a_wake_up_is_never_lost(inbox: Inbox) -> None:
    woken = threading.Event()

    def wait() -> None:
        inbox.take(PATIENCE_S)
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
    assert isinstance(call, LoopCall)
    call.run()
    assert ran == []
