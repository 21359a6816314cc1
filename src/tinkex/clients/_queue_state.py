"""Queue state observers: what a client calls when the server pauses or resumes its operations."""

from __future__ import annotations

from typing import Any, TypeAlias

from tinkex.clients._docstrings import documented
from tinkex.observability.callbacks import expect_callbacks
from tinkex.observability.queues import QueueCallback, QueueStateObserver

__all__ = ["Observer", "QueueStateMixin", "callback_of", "given"]

Observer: TypeAlias = QueueStateObserver | QueueCallback | None
"""A function of the state and the reason, or an object with ``on_queue_state_change``; None is the client itself."""


def callback_of(observer: QueueStateObserver | QueueCallback) -> QueueCallback:
    """The function to call for an observer; raises ``TypeError`` for anything else."""
    expect_callbacks()
    if isinstance(observer, QueueStateObserver):
        return observer.on_queue_state_change
    if not callable(observer):
        raise TypeError(
            f"{type(observer).__name__} cannot observe a queue; give a function of the state and the reason, or an "
            "object with on_queue_state_change"
        )
    return observer


@documented("client")
class QueueStateMixin:
    """The part of a client that receives the queue state of pending operations."""

    _observer: Observer = None

    def on_queue_state_change(self, queue_state: str, queue_state_reason: str | None) -> None:
        """Called on a thread of the client when the server pauses or resumes an operation; override it to be notified."""

    @property
    def queue_state_observer(self) -> Observer:
        """Called instead of the client itself: a function, or an object with ``on_queue_state_change``.

        An observer that is given to a call is called instead of this one, for that call only.
        """
        return self._observer

    @queue_state_observer.setter
    def queue_state_observer(self, observer: Observer) -> None:
        if observer is not None:
            callback_of(observer)
        self._observer = observer

    def _notify_queue_state(self, queue_state: str, queue_state_reason: str | None) -> None:
        observer = self._observer
        notify = self.on_queue_state_change if observer is None else callback_of(observer)
        notify(queue_state, queue_state_reason)


def given(observer: Observer) -> dict[str, Any]:
    """The observer as an argument, only if there is one: a program may have replaced the method it is passed to."""
    return {} if observer is None else {"queue_state_observer": observer}
