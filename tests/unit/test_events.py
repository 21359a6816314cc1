"""Events and where they go."""

from __future__ import annotations

import logging

import pytest

from tinkex.events import (
    Event,
    HeartbeatLost,
    LogSink,
    QueueStateChanged,
    RequestFinished,
    RetryScheduled,
    ServerMessage,
    SessionClosed,
    SessionLost,
    SessionOpened,
    Silent,
    StillWaiting,
)

PAUSED = QueueStateChanged("req-1", "Sample", "paused_rate_limit", "too many samplers")


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (PAUSED, "too many samplers"),
        (QueueStateChanged("req-1", "Sample", "paused_capacity"), "paused capacity"),
        (RetryScheduled("optim_step", 4, 8.0, "connection refused"), "connection refused"),
        (HeartbeatLost("s1", 130.0), "130 s"),
        (StillWaiting("req-1", "Sample", 61.0, "paused_capacity", "3 jobs before you"), "3 jobs before you"),
        (StillWaiting("req-1", "Sample", 61.0, "paused_capacity"), "61 s; the server says: paused capacity"),
        (StillWaiting("req-1", "Sample", 700.0), "says: nothing about its queue"),
        (SessionLost("s1", "status 410"), "410"),
        (SessionClosed("s1", "success", "no answer"), "no answer"),
        (ServerMessage("s1", "warning", "maintenance at noon"), "maintenance at noon"),
    ],
)
def test_what_a_user_should_know_is_a_warning(
    event: Event, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "tinkex"):
        LogSink().emit(event)
    assert words in caplog.text


@pytest.mark.parametrize(
    "event",
    [
        SessionOpened("s1"),
        RequestFinished("optim_step", 0, 200, 0.1),
        RetryScheduled("optim_step", 0, 0.5, "status 503"),
        QueueStateChanged("req-1", "Sample", "active"),
        SessionClosed("s1", "success"),
        StillWaiting("req-1", "Sample", 61.0, "active"),
    ],
)
def test_the_rest_is_for_debugging(event: Event, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "tinkex"):
        LogSink().emit(event)
    assert not caplog.records
    with caplog.at_level(logging.DEBUG, "tinkex"):
        LogSink().emit(event)
    assert type(event).__name__ in caplog.text


def test_repeated_news_is_a_warning_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    sink = LogSink(every_s=3600)
    with caplog.at_level(logging.WARNING, "tinkex"):
        for _ in range(5):
            sink.emit(PAUSED)
    assert len(caplog.records) == 1
    with caplog.at_level(logging.WARNING, "tinkex"):
        for _ in range(2):
            LogSink(every_s=0).emit(PAUSED)
    assert len(caplog.records) == 3


def test_the_silent_sink_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        Silent().emit(PAUSED)
    assert not caplog.records
