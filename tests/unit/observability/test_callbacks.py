"""The queue of a client's callbacks: in order, bounded, and on a thread of its own."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import pytest

from tests.recording import Recorder
from tinkex.observability.callbacks import CallbackQueue, QueuedSink, queued
from tinkex.observability.events import (
    CallbackFailed,
    CallbacksDropped,
    CallbackSlow,
    Event,
    LogSink,
    NullSink,
    SessionOpened,
)
from tinkex.observability.metrics import MetricsSink


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_callbacks_run_in_order_on_one_other_thread() -> None:
    queue, called, threads = CallbackQueue(), list[int](), set[threading.Thread]()

    def callback(number: int) -> None:
        threads.add(threading.current_thread())
        called.append(number)

    for number in range(500):
        assert queue.put("callback", callback, number)
    until(lambda: not queue.pending)
    assert called == list(range(500))
    assert len(threads) == 1
    assert threading.current_thread() not in threads


def test_many_threads_may_put_callbacks_and_none_is_lost() -> None:
    queue, called = CallbackQueue(), list[int]()

    def put_many(start: int) -> None:
        for number in range(200):
            queue.put("callback", called.append, start + number)

    threads = [threading.Thread(target=put_many, args=(1000 * n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    until(lambda: len(called) == 1600)
    assert all([n for n in called if n // 1000 == k] == [1000 * k + n for n in range(200)] for k in range(8))


def test_a_full_queue_drops_and_says_so_and_never_drops_what_must_be_called() -> None:
    log, release, called = Recorder(), threading.Event(), list[int]()
    queue = CallbackQueue(max_queued=3, log=log)
    queue.put("slow", release.wait, 30)
    assert [queue.put("sink", called.append, number) for number in range(5)] == [
        True,
        True,
        False,
        False,
        False,
    ]
    assert queue.put("done", called.append, 99, droppable=False)
    assert queue.num_dropped == 3
    assert [event for event in log.events if isinstance(event, CallbacksDropped)] == [
        CallbacksDropped("sink", 1),
        CallbacksDropped("sink", 2),
    ]
    release.set()
    until(lambda: not queue.pending)
    assert called == [0, 1, 99]


def test_a_slow_callback_is_reported_while_it_runs_and_once() -> None:
    log, started, release = Recorder(), threading.Event(), threading.Event()
    queue = CallbackQueue(slow_s=0.0, log=log)

    def block() -> None:
        started.set()
        release.wait(30)

    queue.put("block", block)
    started.wait(30)
    until(lambda: queue.put("next", lambda: None) and log.events)
    (slow,) = log.events
    assert isinstance(slow, CallbackSlow)
    assert slow.callback == "block"
    release.set()
    until(lambda: not queue.pending)
    assert [event.callback for event in log.events if isinstance(event, CallbackSlow)].count("block") == 1


def test_an_exception_is_reported_and_the_next_callback_is_called() -> None:
    log, called = Recorder(), threading.Event()
    queue = CallbackQueue(log=log)

    def fail() -> None:
        raise LookupError("a mistake")

    queue.put("fail", fail)
    queue.put("next", called.set)
    assert called.wait(30)
    assert log.events == [CallbackFailed("fail", "LookupError: a mistake")]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_starts_a_thread_of_its_own() -> None:
    queue, release = CallbackQueue(), threading.Event()
    queue.put("block", release.wait, 30)
    child = os.fork()
    if child == 0:
        called = threading.Event()
        queue.put("child", called.set)
        os._exit(0 if called.wait(30) else 1)
    release.set()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_clients_that_share_a_sink_share_its_queue_and_our_own_sinks_need_none() -> None:
    shared = Recorder()
    one, two = queued(shared), queued(shared)
    assert isinstance(one, QueuedSink)
    assert isinstance(two, QueuedSink)
    assert one.queue is two.queue
    assert queued(one) is one
    other = queued(Recorder())
    assert isinstance(other, QueuedSink)
    assert other.queue is not one.queue
    assert isinstance(queued(None), LogSink)
    silent = NullSink()
    assert queued(silent) is silent


def test_metrics_count_immediately_and_forward_later() -> None:
    release, received = threading.Event(), list[Event]()

    class Blocking:
        def emit(self, event: Event) -> None:
            release.wait(30)
            received.append(event)

    sink = MetricsSink(then=Blocking())
    queued(sink).emit(SessionOpened("session-1"))
    assert sink.metrics.snapshot().counters['tinkex_events_total{event="SessionOpened"}'] == 1
    assert received == []
    release.set()
    until(lambda: received == [SessionOpened("session-1")])
