"""One event reaches every subscriber, once."""

from __future__ import annotations

from tests.recording import Recorder
from tinkex.observability.bus import EventBus
from tinkex.observability.events import Event, SessionClosed, SessionOpened

OPENED, CLOSED = SessionOpened("s"), SessionClosed("s", "completed")


def test_every_subscriber_receives_an_event_once() -> None:
    first, second = Recorder(), Recorder()
    bus = EventBus(first)
    bus.emit(OPENED)
    bus.subscribe(second)
    bus.emit(CLOSED)
    assert first.events == [OPENED, CLOSED]
    assert second.events == [CLOSED]


def test_a_sink_that_has_unsubscribed_receives_nothing_more() -> None:
    leaving, staying = Recorder(), Recorder()
    bus = EventBus(leaving, staying)
    bus.unsubscribe(leaving)
    bus.emit(OPENED)
    assert not leaving.events
    assert staying.events == [OPENED]


def test_an_observer_of_one_operation_receives_the_events_it_is_named_for() -> None:
    subscriber, observer = Recorder(), Recorder()
    bus = EventBus(subscriber)
    bus.emit(OPENED, observer)
    bus.emit(CLOSED)
    assert subscriber.events == [OPENED, CLOSED]
    assert observer.events == [OPENED]


def test_a_sink_may_unsubscribe_while_an_event_is_delivered() -> None:
    class Once(Recorder):
        def emit(self, event: Event) -> None:
            super().emit(event)
            bus.unsubscribe(self)

    once, after = Once(), Recorder()
    bus = EventBus(once, after)
    bus.emit(OPENED)
    bus.emit(CLOSED)
    assert once.events == [OPENED]
    assert after.events == [OPENED, CLOSED]
