"""Events and where they go."""

from __future__ import annotations

import logging
import time

import pytest

import tinkex
from tests.scripted import ScriptedServer
from tinkex._runtime import background
from tinkex.clients.session import Session
from tinkex.observability.events import (
    MAX_REMEMBERED_KINDS,
    Event,
    HeartbeatLost,
    LogSink,
    NullSink,
    QueueStateChanged,
    RequestFinished,
    RetryScheduled,
    ServerMessage,
    SessionClosed,
    SessionLost,
    SessionOpened,
    StillWaiting,
    guard,
)

PAUSED = QueueStateChanged("req-1", "Sample", "paused_rate_limit", "too many samplers")


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (PAUSED, "too many samplers"),
        (
            QueueStateChanged("req-1", "Sample", "paused_capacity", None, "sess:sample:0"),
            "Sampling is paused for sess:sample:0. Reason: the server is short of capacity, please wait",
        ),
        (
            QueueStateChanged("req-1", "Sample", "paused_rate_limit"),
            "Sampling is paused for req-1. Reason: the limit of concurrent samplers is reached",
        ),
        (
            QueueStateChanged("req-1", "OptimStep", "paused_rate_limit", None, "sess:train:0"),
            "Training is paused for sess:train:0. Reason: the limit of concurrent training runs is reached",
        ),
        (QueueStateChanged("req-1", "ForwardBackward", "unknown"), "Reason: the server gives no reason"),
        (RetryScheduled("optim_step", 4, 8.0, "connection refused"), "connection refused"),
        (HeartbeatLost("s1", 130.0), "130 s"),
        (StillWaiting("req-1", "Sample", 61.0, "paused_capacity", "3 jobs before you"), "3 jobs before you"),
        (StillWaiting("req-1", "Sample", 61.0, "paused_capacity"), "61 s; queue state: paused capacity"),
        (StillWaiting("req-1", "Sample", 700.0), "queue state: unknown"),
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


def test_a_paused_queue_is_logged_once_a_minute_for_each_client_and_state(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sink = LogSink(every_s=3600)
    with caplog.at_level(logging.WARNING, "tinkex"):
        for kind in ("ForwardBackward", "OptimStep", "SaveWeights"):
            for state in ("paused_capacity", "paused_rate_limit", "active"):
                for run in ("s:train:0", "s:train:1"):
                    sink.emit(QueueStateChanged(f"req-{kind}", kind, state, None, run))
    reported = [record.getMessage().partition(" Reason")[0] for record in caplog.records]
    assert sorted(reported) == sorted(
        ["Training is paused for s:train:0.", "Training is paused for s:train:1."] * 2
    )


def test_old_messages_are_forgotten_so_that_memory_does_not_grow(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sink = LogSink(logging.getLogger("tinkex.test.quiet"), every_s=0.0)
    for number in range(3 * MAX_REMEMBERED_KINDS):
        sink.emit(QueueStateChanged("r", "Sample", "paused_capacity", None, f"sampler-{number}"))
    tables = [value for value in vars(sink).values() if isinstance(value, dict)]
    assert tables
    assert all(len(table) <= MAX_REMEMBERED_KINDS for table in tables)


def test_the_silent_sink_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        NullSink().emit(PAUSED)
    assert not caplog.records


class Mistaken:
    def __init__(self, mistake: BaseException | None = None) -> None:
        self._mistake = mistake or RuntimeError("a mistake of the program's")

    def emit(self, event: Event) -> None:
        raise self._mistake


def test_a_sink_that_raises_ends_nothing_and_is_logged_at_intervals(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "tinkex"):
        sink = guard(Mistaken())
        for _ in range(3):
            sink.emit(SessionOpened("s1"))
    assert caplog.text.count("Mistaken.emit raised RuntimeError: a mistake of the program's") == 1


def test_what_is_not_a_sink_is_rejected_where_it_is_given() -> None:
    with pytest.raises(TypeError, match="emit"):
        guard(print)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="emit"):
        tinkex.ServiceClient(base_url="local", events=print)  # type: ignore[arg-type]


@pytest.mark.parametrize("mistake", [RuntimeError("a mistake of the program's"), SystemExit(3)], ids=repr)
def test_a_client_works_and_beats_although_its_sink_raises(mistake: BaseException) -> None:
    server = ScriptedServer()
    service = tinkex.ServiceClient(transport=server.transport, events=Mistaken(mistake))
    session = Session(service.holder.caller, heartbeat_interval_s=0.01)
    background().run(session.opened())
    training = service.create_lora_training_client("toy")
    training.optim_step(tinkex.AdamParams()).result(30)
    seen = len(server.values("session_heartbeat"))
    deadline = time.monotonic() + 30
    while len(server.values("session_heartbeat")) < seen + 3:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    background().run(session.finish("success"))
