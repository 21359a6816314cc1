"""The observation seam: each event is emitted once, and every subscriber receives it.

>>> from tinkex.observability.events import SessionOpened
>>> class Printer:
...     def emit(self, event):
...         print(event)
>>> bus = EventBus()
>>> bus.subscribe(Printer())
>>> bus.emit(SessionOpened("session-1"))
SessionOpened(session_id='session-1')
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tinkex.observability.events import Event, Sink

__all__ = ["EventBus"]


class EventBus:
    """Delivers events to its subscribers, in the order in which they subscribed; it is itself a sink.

    Events may come from any thread. A user's sink is wrapped by ``guard`` before it subscribes, so no sink raises.
    """

    def __init__(self, *sinks: Sink) -> None:
        self._sinks = sinks

    def subscribe(self, sink: Sink) -> None:
        """Delivers every event from now on to ``sink`` too."""
        self._sinks = (*self._sinks, sink)

    def unsubscribe(self, sink: Sink) -> None:
        """Delivers no more events to ``sink``."""
        self._sinks = tuple(each for each in self._sinks if each is not sink)

    def emit(self, event: Event, *observers: Sink) -> None:
        """Delivers one event to every subscriber, and to the ``observers`` of the operation it is about."""
        for sink in self._sinks:
            sink.emit(event)
        for observer in observers:
            observer.emit(event)
