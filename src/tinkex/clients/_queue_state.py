"""Queue state observers: what a client calls when the server pauses or resumes its operations."""

from __future__ import annotations

from typing import TypeAlias

from tinkex.observability.queues import QueueCallback, QueueStateObserver

__all__ = ["QueueStateMixin"]

Observer: TypeAlias = QueueStateObserver | QueueCallback | None


class QueueStateMixin:
    """The part of a client that receives the queue state of pending operations."""

    _observer: Observer = None

    def on_queue_state_change(self, queue_state: str, queue_state_reason: str | None) -> None:
        """Called on the client's thread when the server pauses or resumes an operation; override it to be notified."""

    @property
    def queue_state_observer(self) -> Observer:
        """Called instead of the client itself: a function, or an object with ``on_queue_state_change``."""
        return self._observer

    @queue_state_observer.setter
    def queue_state_observer(self, observer: Observer) -> None:
        if observer is not None and not callable(observer) and not isinstance(observer, QueueStateObserver):
            raise TypeError(
                f"{type(observer).__name__} cannot observe a queue; give a function of the state and the reason, or an "
                "object with on_queue_state_change"
            )
        self._observer = observer

    def _notify_queue_state(self, queue_state: str, queue_state_reason: str | None) -> None:
        observer = self._observer
        if observer is None:
            self.on_queue_state_change(queue_state, queue_state_reason)
        elif isinstance(observer, QueueStateObserver):
            observer.on_queue_state_change(queue_state, queue_state_reason)
        else:
            observer(queue_state, queue_state_reason)
