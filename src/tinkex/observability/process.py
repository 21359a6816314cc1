"""Sinks for all clients of this process, attached and detached while it runs.

A client has a sink of its own (``events=``). A sink that is attached here receives the events of every client, also of those
that exist already, and those of ``with_retry``, regularizers and recovery::

    from tinkex.observability import process
    from tinkex.observability.events import RetryScheduled

    logger = process.attach_logger(level="WARNING", events=[RetryScheduled])
    ...
    process.detach(logger)

    metrics = process.metrics()  # counts the requests of all clients from now on
    print(metrics.prometheus())
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from tinkex.observability.bus import EventBus
from tinkex.observability.callbacks import MAX_PROCESS_WAIT_S, MAX_WAIT_S, QueuedSink, queued
from tinkex.observability.events import NullSink

if TYPE_CHECKING:
    from tinkex.observability.events import Event, Sink
    from tinkex.observability.metrics import Metrics

__all__ = ["EventLogger", "attach", "attach_logger", "detach", "metrics"]

BUS = EventBus()
"""Every client's bus delivers to this one."""


def bus_for(events: Sink | None, wrap: Callable[[Sink | None], Sink] = queued) -> EventBus:
    """The bus of something that is not a client: it delivers to a user's sink and to those of this process.

    The bus of a client, which does so already, is returned as it is.
    """
    return events if isinstance(events, EventBus) else EventBus(wrap(events), BUS)


_lock = threading.Lock()
_attached: list[tuple[Sink, Sink]] = []
"""The sinks of users, each with its guard."""
_metrics: Metrics | None = None


class EventLogger:
    """Writes each event as one line: its name and its fields.

    >>> from tinkex.observability.events import SessionOpened
    >>> EventLogger.line(SessionOpened("session-1"))
    "SessionOpened session_id='session-1'"
    """

    def __init__(self, logger: logging.Logger, level: int, events: tuple[type[Any], ...] | None) -> None:
        self._logger, self._level, self._events = logger, level, events

    def emit(self, event: Event) -> None:
        """Logs ``event``, if it is one of the chosen.

        ::

            EventLogger(logging.getLogger("events"), logging.INFO, None).emit(event)
        """
        if self._events is None or isinstance(event, self._events):
            self._logger.log(self._level, "%s", self.line(event))

    @staticmethod
    def line(event: Event) -> str:
        """Returns ``event`` as text.

        >>> from tinkex.observability.events import SessionOpened
        >>> EventLogger.line(SessionOpened("session-1"))
        "SessionOpened session_id='session-1'"
        """
        shown = (f"{field.name}={getattr(event, field.name)!r}" for field in fields(event))
        return " ".join([type(event).__name__, *shown])


def attach(sink: Sink) -> Sink:
    """Delivers the events of every client to ``sink`` from now on; returns it, for :func:`detach`.

    >>> from tinkex.observability.metrics import MetricsSink
    >>> sink = attach(MetricsSink())
    >>> detach(sink)
    True
    """
    guarded = queued(sink, MAX_PROCESS_WAIT_S)
    with _lock:
        if any(each is sink for each, _ in _attached):
            raise ValueError(f"this {type(sink).__name__} is attached already; detach it first")
        _attached.append((sink, guarded))
        BUS.subscribe(guarded)
    return sink


def detach(sink: Sink) -> bool:
    """Delivers no more events to the attached ``sink``, after those so far (for at most 1 s); returns whether it was attached.

    >>> detach(NullSink())
    False
    """
    with _lock:
        guarded = next((guarded for each, guarded in _attached if each is sink), None)
        if guarded is None:
            return False
        _attached[:] = [pair for pair in _attached if pair[1] is not guarded]
        BUS.unsubscribe(guarded)
    if isinstance(guarded, QueuedSink):
        guarded.queue.drain(time.monotonic() + MAX_WAIT_S)
    return True


def attach_logger(
    logger: logging.Logger | None = None,
    *,
    level: int | str = "INFO",
    events: Iterable[type[Any]] | None = None,
) -> Sink:
    """Logs the events of every client from now on, one line each; returns what :func:`detach` takes.

    ``logger`` is ``tinkex.events`` by default, and ``level`` the level of the lines; ``events`` chooses the classes of
    events, all by default.

    >>> from tinkex.observability.events import RetryScheduled
    >>> sink = attach_logger(level="WARNING", events=[RetryScheduled])
    >>> detach(sink)
    True
    """
    number = logging.getLevelNamesMapping().get(level.upper()) if isinstance(level, str) else level
    if number is None:
        raise ValueError(f"level is the name or number of a logging level, such as 'INFO'; got {level!r}")
    chosen = None if events is None else tuple(events)
    if chosen is not None and not all(isinstance(one, type) for one in chosen):
        raise TypeError("events are classes of tinkex.observability.events, such as RequestFinished")
    return attach(EventLogger(logger or logging.getLogger("tinkex.events"), number, chosen))


def metrics() -> Metrics:
    """The metrics of all clients of this process, counted since the first call of this function.

    ::

        print(process.metrics().prometheus())
    """
    global _metrics  # noqa: PLW0603 - one per process, that is its purpose
    from tinkex.observability.metrics import MetricsSink

    with _lock:
        if _metrics is None:
            sink = MetricsSink(then=NullSink())  # each client's own sink logs
            BUS.subscribe(sink)
            _metrics = sink.metrics
        return _metrics
