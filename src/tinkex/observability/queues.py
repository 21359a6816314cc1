"""Queue observers: user callbacks for when the server pauses or resumes an operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

from tinkex.observability.events import CallbackFailed, QueueStateChanged

if TYPE_CHECKING:
    from tinkex.observability.events import Event, Sink

__all__ = ["QueueCallback", "QueueSink", "QueueStateObserver"]

QueueCallback: TypeAlias = Callable[[str, str | None], None]
"""Called with the queue state and the server's reason for it."""


@runtime_checkable
class QueueStateObserver(Protocol):
    """Anything with this method; training and sampling clients are their own observers by default."""

    def on_queue_state_change(self, queue_state: str, queue_state_reason: str | None) -> None:
        """Called with ``active``, ``paused_capacity``, ``paused_rate_limit`` or ``unknown``, and the server's reason."""
        ...


class QueueSink:
    """Calls a queue observer with the events of one operation; emits ``CallbackFailed`` if it raises.

    >>> from tinkex.observability.events import NullSink
    >>> QueueSink(print, NullSink()).emit(QueueStateChanged("r1", "Sample", "paused_capacity", "busy"))
    paused_capacity busy
    """

    def __init__(self, callback: QueueCallback, failures: Sink) -> None:
        self._callback = callback
        self._failures = failures

    def emit(self, event: Event) -> None:
        """Receives one event."""
        if not isinstance(event, QueueStateChanged):
            return
        try:
            self._callback(event.state, event.reason)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - emitted; the operation continues
            failed = CallbackFailed("on_queue_state_change", f"{type(error).__name__}: {error}")
            self._failures.emit(failed)
