"""Typed events that the client emits, and the sinks that receive them.

Events hold names, numbers and ids only, never headers, bodies, prompts or keys, so a sink may write them
anywhere. Pass your own sink to a client::

    class Counter:
        def __init__(self) -> None:
            self.requests = 0

        def emit(self, event: Event) -> None:
            self.requests += isinstance(event, RequestFinished)

    service = tinkex.ServiceClient(base_url="local", events=Counter())
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

__all__ = [
    "CallbackFailed",
    "CallbackSlow",
    "CallbacksDropped",
    "CircuitChanged",
    "CustomLossFinished",
    "CustomLossStarted",
    "Event",
    "HeartbeatFailed",
    "HeartbeatLost",
    "LogSink",
    "NullSink",
    "QueueStateChanged",
    "RecoveryFailed",
    "RecoveryStarted",
    "RegularizerFinished",
    "RegularizerStarted",
    "RequestFinished",
    "RequestStarted",
    "RetryScheduled",
    "RunCheckFailed",
    "RunRecovered",
    "RunUnhealthy",
    "SamplingPaused",
    "ServerMessage",
    "SessionClosed",
    "SessionLost",
    "SessionOpened",
    "Sink",
    "StillWaiting",
    "StreamingUnavailable",
    "TelemetryDataDropped",
    "guard",
]


@dataclass(frozen=True, slots=True)
class RequestStarted:
    """A request is sent; ``attempt`` is 0 for the first try."""

    endpoint: str
    attempt: int


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """A response was received, or the request failed without one (``status`` is None, ``error`` gives the reason)."""

    endpoint: str
    attempt: int
    status: int | None
    elapsed_s: float
    error: str | None = None

    @property
    def failed(self) -> bool:
        """Whether there was no response, or one with an error status; a 408 is the normal end of a long poll.

        >>> [RequestFinished("retrieve_future", 0, status, 0.1).failed for status in (200, 302, 408, 500, None)]
        [False, False, False, True, True]
        """
        status = self.status
        if status is None or status >= 400:
            return not (status == 408 and self.endpoint in POLLS)
        return False


POLLS = frozenset({"retrieve_future", "retrieve_futures"})


@dataclass(frozen=True, slots=True)
class RetryScheduled:
    """A request failed with a retryable error and is sent again after ``after_s`` seconds."""

    endpoint: str
    attempt: int
    after_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class QueueStateChanged:
    """The queue state of a waiting operation changed; ``client`` is the run or sampler it belongs to."""

    request_id: str
    request_type: str
    state: str
    reason: str | None = None
    client: str = ""


@dataclass(frozen=True, slots=True)
class StillWaiting:
    """A result is still pending after a long wait; ``state`` and ``reason`` are the last that the server reported."""

    request_id: str
    request_type: str
    waited_s: float
    state: str | None = None
    reason: str | None = None
    client: str = ""


@dataclass(frozen=True, slots=True)
class SamplingPaused:
    """The server applied backpressure; the session submits no samples for ``after_s`` seconds.

    ``reason`` is the server's; ``prompt_bytes`` is the estimated size of the prompt that was rejected: after a large one the
    pause is longer.
    """

    session_id: str
    after_s: float
    reason: str | None = None
    prompt_bytes: int = 0


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """The server created the session."""

    session_id: str


@dataclass(frozen=True, slots=True)
class ServerMessage:
    """A message from the server to the user; ``level`` is info, warning or error."""

    session_id: str
    level: str
    text: str


@dataclass(frozen=True, slots=True)
class HeartbeatLost:
    """No heartbeat has reached the server for ``silent_s`` seconds; the server may end the session."""

    session_id: str
    silent_s: float


@dataclass(frozen=True, slots=True)
class HeartbeatFailed:
    """A heartbeat failed with an unexpected exception; the next one is sent as usual."""

    session_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class SessionLost:
    """The server rejects this session's heartbeats: the session has ended."""

    session_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class SessionClosed:
    """The program closed the session; ``error`` is set if the server could not be notified."""

    session_id: str
    status: str
    error: str | None = None


@dataclass(frozen=True, slots=True)
class RunUnhealthy:
    """A monitored run cannot continue: it is ``corrupted``, ``lost`` or ``unreachable``."""

    run_id: str
    condition: str
    reason: str


@dataclass(frozen=True, slots=True)
class RunCheckFailed:
    """A health check of a monitored run failed; the next check tries again."""

    run_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class RecoveryStarted:
    """A run is being restarted from a checkpoint; ``attempt`` is 0 for the first try."""

    run_id: str
    attempt: int
    checkpoint: str


@dataclass(frozen=True, slots=True)
class RunRecovered:
    """A run was restored from a checkpoint and continues as a new run."""

    run_id: str
    new_run_id: str
    checkpoint: str
    attempt: int


@dataclass(frozen=True, slots=True)
class RecoveryFailed:
    """An attempt to restart a run failed; the next one is in ``after_s`` seconds, or never if that is None."""

    run_id: str
    attempt: int
    reason: str
    after_s: float | None


@dataclass(frozen=True, slots=True)
class CallbackFailed:
    """A user callback raised an exception; the client continues."""

    callback: str
    reason: str


@dataclass(frozen=True, slots=True)
class CallbackSlow:
    """A user callback has run for so long; later callbacks of the same client wait for it, the client does not."""

    callback: str
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class CallbacksDropped:
    """A sink or observer is so slow that its queue is full: ``count`` events were not delivered so far."""

    callback: str
    count: int


@dataclass(frozen=True, slots=True)
class TelemetryDataDropped:
    """Fields of a telemetry event were not sent: only numbers, booleans, None and short strings are."""

    event_name: str
    fields: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StreamingUnavailable:
    """The server does not stream (it responded with this status), so the sample was delivered in one piece."""

    sampling_session_id: str
    status: int


@dataclass(frozen=True, slots=True)
class CircuitChanged:
    """A circuit breaker stopped sending calls (``open``), probes whether they succeed again (``half_open``), or resumed (``closed``).

    ``endpoint`` is that of the calls; it and ``purpose`` are ``connection`` for the breaker that all keys and endpoints of
    the server share.
    """

    base_url: str
    purpose: str
    state: str
    reason: str
    endpoint: str = ""


@dataclass(frozen=True, slots=True)
class CustomLossStarted:
    """A custom loss is computed in this process, on the logprobs of its first pass."""

    num_datums: int
    num_regularizers: int


@dataclass(frozen=True, slots=True)
class CustomLossFinished:
    """A custom loss was computed and differentiated, or failed (``error`` gives the reason): nothing is added to the gradient.

    ``loss`` is the total, of which ``regularizer_loss`` is the part of the regularizers.
    """

    num_datums: int
    elapsed_s: float
    loss: float | None = None
    regularizer_loss: float | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class RegularizerStarted:
    """The computation of a loss term starts, on the thread that computes the loss."""

    name: str
    weight: float


@dataclass(frozen=True, slots=True)
class RegularizerFinished:
    """A loss term was computed, with its gradient norm; or it failed (``error`` gives the reason), and so does the pass."""

    name: str
    weight: float
    elapsed_s: float
    value: float | None = None
    grad_norm: float | None = None
    error: str | None = None


Event: TypeAlias = (
    RequestStarted
    | RequestFinished
    | RetryScheduled
    | QueueStateChanged
    | StillWaiting
    | SamplingPaused
    | SessionOpened
    | ServerMessage
    | HeartbeatLost
    | HeartbeatFailed
    | SessionLost
    | SessionClosed
    | RunUnhealthy
    | RunCheckFailed
    | RecoveryStarted
    | RunRecovered
    | RecoveryFailed
    | CallbackFailed
    | CallbackSlow
    | CallbacksDropped
    | TelemetryDataDropped
    | StreamingUnavailable
    | CircuitChanged
    | CustomLossStarted
    | CustomLossFinished
    | RegularizerStarted
    | RegularizerFinished
)


class Sink(Protocol):
    """Receives the events of a client, in order, on a thread of its own; a slow sink delays no other client.

    An exception it raises is logged as a warning and has no other effect. While a sink is slow, at most 10,000 events wait
    for it, and further ones are dropped.
    """

    def emit(self, event: Event) -> None:
        """Receives one event."""


class NullSink:
    """Drops every event."""

    def emit(self, event: Event) -> None:
        """Does nothing."""


MAX_REMEMBERED_KINDS = 1000
"""Number of warning kinds remembered for rate limiting; beyond it, only recent ones are kept."""


class LogSink:
    """Logs events to a standard logger: those a user should see as warnings, the rest at debug level.

    Repeated events of the same kind (a paused queue, an unreachable server) are logged as a warning at most once per
    ``every_s`` seconds.

    >>> LogSink().emit(SessionOpened("session-1"))
    """

    QUIET_ATTEMPTS = 2
    """Number of retries that are logged at debug level only: most of them succeed."""

    def __init__(self, logger: logging.Logger | None = None, *, every_s: float = 60.0) -> None:
        self._logger = logger or logging.getLogger("tinkex")
        self._every_s = every_s
        self._last: dict[str, float] = {}

    def emit(self, event: Event) -> None:
        """Logs one event."""
        if isinstance(event, RequestStarted | RequestFinished):  # by far the most frequent events
            if self._logger.isEnabledFor(logging.DEBUG):
                self._logger.debug("%r", event)
            return
        from tinkex.observability.warnings import warning_for

        text, kind = warning_for(event, self.QUIET_ATTEMPTS)
        if text is not None and self._due(kind):
            self._logger.warning(text)
        elif isinstance(event, ServerMessage):
            level = {"error": logging.ERROR, "warning": logging.WARNING}.get(event.level, logging.INFO)
            self._logger.log(level, "%s", event.text)
        elif self._logger.isEnabledFor(logging.DEBUG):
            self._logger.debug("%r", event)

    def _due(self, kind: str) -> bool:
        now = time.monotonic()
        last = self._last.get(kind)
        if last is not None and now - last < self._every_s:
            return False
        if len(self._last) >= MAX_REMEMBERED_KINDS:
            # Kinds older than the interval may be logged again, so they are dropped.
            self._last = {kind: last for kind, last in self._last.items() if now - last < self._every_s}
        self._last[kind] = now
        return True


def guard(sink: Sink | None) -> Sink:
    """Wraps a sink so that its exceptions are logged as warnings; returns a ``LogSink`` for None.

    >>> class Counter:
    ...     def emit(self, event):
    ...         raise RuntimeError("a mistake")
    >>> guard(Counter()).emit(SessionOpened("session-1"))
    """
    if sink is None:
        return LogSink()
    if isinstance(sink, LogSink | NullSink | GuardedSink):
        return sink
    if not callable(getattr(sink, "emit", None)):
        raise TypeError(f"events must be an object with a method emit(event), got {type(sink).__name__}")
    return GuardedSink(sink)


class GuardedSink:
    """Wraps a user's sink and logs its exceptions, so that they do not reach the client."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self.name = f"{type(sink).__name__}.emit"
        self._log = LogSink()

    def emit(self, event: Event) -> None:
        """Forwards one event."""
        try:
            self._sink.emit(event)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - logged; an observer must not fail the operation
            failed = f"{type(error).__name__}: {error}"
            self._log.emit(CallbackFailed(self.name, failed))


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Loads a name of 0.1, with a ``DeprecationWarning``."""
        if name.startswith("__"):  # the import system looks up __path__
            raise AttributeError(name)
        from tinkex._moved import load_renamed

        return load_renamed(__name__, name)
