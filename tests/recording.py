"""A sink that keeps the events of a client, for tests."""

from __future__ import annotations

from typing import TypeVar

from tinkex.observability.events import Event

T = TypeVar("T")


class Recorder:
    """Keeps every event in the order of arrival."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def of(self, kind: type[T]) -> list[T]:
        """The events of one kind."""
        return [event for event in self.events if isinstance(event, kind)]
