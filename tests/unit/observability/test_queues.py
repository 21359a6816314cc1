"""A queue observer receives what the server says about its operation, and its mistakes end nothing."""

from __future__ import annotations

from tests.recording import Recorder
from tinkex.observability.events import CallbackFailed, QueueStateChanged, StillWaiting
from tinkex.observability.queues import QueueSink, QueueStateObserver

PAUSED = QueueStateChanged("r1", "Sample", "paused_capacity", "busy", "sampler-1")


def test_it_is_called_with_the_state_and_the_reason() -> None:
    received: list[tuple[str, str | None]] = []
    sink = QueueSink(lambda state, reason: received.append((state, reason)), Recorder())
    sink.emit(PAUSED)
    sink.emit(StillWaiting("r1", "Sample", 60.0))
    assert received == [("paused_capacity", "busy")]


def test_what_it_raises_is_an_event() -> None:
    def observer(state: str, reason: str | None) -> None:
        raise LookupError(state)

    failures = Recorder()
    QueueSink(observer, failures).emit(PAUSED)
    assert failures.events == [CallbackFailed("on_queue_state_change", "LookupError: paused_capacity")]


def test_an_observer_is_anything_with_the_method() -> None:
    class Watcher:
        def on_queue_state_change(self, queue_state: str, queue_state_reason: str | None) -> None: ...

    assert isinstance(Watcher(), QueueStateObserver)
    assert not isinstance(print, QueueStateObserver)
