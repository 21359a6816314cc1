"""What the client says about itself while it works: typed events, and the sink they go to.

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
from typing import Protocol, TypeAlias

__all__ = [
    "CallbackFailed",
    "CircuitChanged",
    "Event",
    "HeartbeatLost",
    "LogSink",
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
    "RunTroubled",
    "SamplingPaused",
    "ServerMessage",
    "SessionClosed",
    "SessionLost",
    "SessionOpened",
    "Silent",
    "Sink",
    "StillWaiting",
    "StreamingUnavailable",
    "guarded",
]


@dataclass(frozen=True, slots=True)
class RequestStarted:
    """A request goes out; ``attempt`` is 0 for the first try."""

    endpoint: str
    attempt: int


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """A request came back with a status, or failed before one (``status`` is None, ``error`` says why)."""

    endpoint: str
    attempt: int
    status: int | None
    elapsed_s: float
    error: str | None = None


@dataclass(frozen=True, slots=True)
class RetryScheduled:
    """A request failed in a way that is worth another try."""

    endpoint: str
    attempt: int
    after_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class QueueStateChanged:
    """The server says how it treats an operation that waits; ``client`` is the run or sampler it belongs to."""

    request_id: str
    request_type: str
    state: str
    reason: str | None = None
    client: str = ""


@dataclass(frozen=True, slots=True)
class StillWaiting:
    """A result has not come for a while; ``state`` and ``reason`` are what the server last said."""

    request_id: str
    request_type: str
    waited_s: float
    state: str | None = None
    reason: str | None = None
    client: str = ""


@dataclass(frozen=True, slots=True)
class SamplingPaused:
    """The server pushed back; no sample of this session is submitted for a while."""

    session_id: str
    after_s: float


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """The server knows this program now."""

    session_id: str


@dataclass(frozen=True, slots=True)
class ServerMessage:
    """Something the server wants its user to read; ``level`` is info, warning or error."""

    session_id: str
    level: str
    text: str


@dataclass(frozen=True, slots=True)
class HeartbeatLost:
    """No heartbeat has got through for a while; the server may think that this program is gone."""

    session_id: str
    silent_s: float


@dataclass(frozen=True, slots=True)
class SessionLost:
    """The server does not want this session's heartbeats any more."""

    session_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class SessionClosed:
    """The session was finished by the program; ``error`` says why the server could not be told."""

    session_id: str
    status: str
    error: str | None = None


@dataclass(frozen=True, slots=True)
class RunTroubled:
    """A watched run cannot go on: it is ``corrupted``, ``lost`` or ``unreachable``."""

    run_id: str
    condition: str
    reason: str


@dataclass(frozen=True, slots=True)
class RunCheckFailed:
    """The server could not be asked how a watched run is; it is asked again at the next round."""

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
    """A run goes on as another one, from a checkpoint."""

    run_id: str
    new_run_id: str
    checkpoint: str
    attempt: int


@dataclass(frozen=True, slots=True)
class RecoveryFailed:
    """A try to restart a run failed; the next one is after so many seconds, or never (None)."""

    run_id: str
    attempt: int
    reason: str
    after_s: float | None


@dataclass(frozen=True, slots=True)
class CallbackFailed:
    """A function of the user's, called with news, raised; the news stands."""

    callback: str
    reason: str


@dataclass(frozen=True, slots=True)
class StreamingUnavailable:
    """The server has no streaming (it answered with this status), so a sample came all at once."""

    sampling_session_id: str
    status: int


@dataclass(frozen=True, slots=True)
class CircuitChanged:
    """Calls of a kind are no longer sent to a server that keeps failing (``open``), or are again (``closed``)."""

    base_url: str
    purpose: str
    state: str
    reason: str


@dataclass(frozen=True, slots=True)
class RegularizerStarted:
    """A term of a loss begins to be computed, on the thread that computes the loss."""

    name: str
    weight: float


@dataclass(frozen=True, slots=True)
class RegularizerFinished:
    """A term of a loss is known, with the length of its gradient; or it failed (``error`` says why) and so does the pass."""

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
    | SessionLost
    | SessionClosed
    | RunTroubled
    | RunCheckFailed
    | RecoveryStarted
    | RunRecovered
    | RecoveryFailed
    | CallbackFailed
    | StreamingUnavailable
    | CircuitChanged
    | RegularizerStarted
    | RegularizerFinished
)


class Sink(Protocol):
    """Receives events, on the client's background thread; it must be quick and must not call the client.

    What it raises is a warning in the log, and ends nothing.
    """

    def emit(self, event: Event) -> None:
        """Takes one event."""


class Silent:
    """Drops every event."""

    def emit(self, event: Event) -> None:
        """Does nothing."""


SAMPLING = "Sample"
"""The type of requests that are samples; all others belong to training."""

REASONS = {
    ("Sampling", "paused_rate_limit"): "the limit of concurrent samplers is reached",
    ("Training", "paused_rate_limit"): "the limit of concurrent training runs is reached",
    ("Sampling", "paused_capacity"): "the server is short of capacity, please wait",
    ("Training", "paused_capacity"): "the server is short of capacity, please wait",
}
"""What a pause means where the server does not say it."""

MOST_KINDS = 1000
"""Kinds of news that are remembered; beyond it those of the last minute only."""

LONG_WAIT_S = 600.0
"""From here on a result that does not come is worth a warning, even if the server says that all is well."""


class LogSink:
    """Writes events to a standard logger: what a user should know as warnings, the rest for debugging.

    Repeated news of the same kind (a paused queue, a server that cannot be reached) is a warning at most
    once per ``every_s`` seconds.

    >>> LogSink().emit(SessionOpened("session-1"))
    """

    QUIET_ATTEMPTS = 2
    """Retries that are not worth a warning: most of them succeed."""

    def __init__(self, logger: logging.Logger | None = None, *, every_s: float = 60.0) -> None:
        self._logger = logger or logging.getLogger("tinkex")
        self._every_s = every_s
        self._last: dict[str, float] = {}

    def emit(self, event: Event) -> None:
        """Logs one event."""
        if isinstance(event, RequestStarted | RequestFinished):  # by far the most frequent news
            if self._logger.isEnabledFor(logging.DEBUG):
                self._logger.debug("%r", event)
            return
        text, kind = _warning(event, self.QUIET_ATTEMPTS)
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
        if len(self._last) >= MOST_KINDS:
            # What was said long ago may be said again, so it need not be remembered.
            self._last = {kind: last for kind, last in self._last.items() if now - last < self._every_s}
        self._last[kind] = now
        return True


def guarded(sink: Sink | None) -> Sink:
    """A sink whose mistakes end nothing: what it raises is a warning in the log; without one, events are logged.

    >>> class Counter:
    ...     def emit(self, event):
    ...         raise RuntimeError("a mistake")
    >>> guarded(Counter()).emit(SessionOpened("session-1"))
    """
    if sink is None:
        return LogSink()
    if isinstance(sink, LogSink | Silent | Guarded):
        return sink
    if not callable(getattr(sink, "emit", None)):
        raise TypeError(f"events is an object with a method emit(event), got {type(sink).__name__}")
    return Guarded(sink)


class Guarded:
    """A sink of the program's, between which and the client its exceptions stay."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._log = LogSink()

    def emit(self, event: Event) -> None:
        """Passes one event on."""
        try:
            self._sink.emit(event)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whoever watches must not end what is watched; the log says so
            failed = f"{type(error).__name__}: {error}"
            self._log.emit(CallbackFailed(f"{type(self._sink).__name__}.emit", failed))


def _warning(event: Event, quiet_attempts: int) -> tuple[str | None, str]:
    """The text of an event that deserves a warning, and the kind under which repetitions are counted."""
    match event:
        case RetryScheduled() if event.attempt >= quiet_attempts:
            text = f"{event.endpoint}: {event.reason}; try {event.attempt + 2} in {event.after_s:.1f} s"
            return text, f"retry {event.endpoint}"
        case QueueStateChanged() if event.state != "active":
            work = "Sampling" if event.request_type == SAMPLING else "Training"
            why = event.reason or REASONS.get((work, event.state), "the server gives no reason")
            whose = event.client or event.request_id
            return f"{work} is paused for {whose}. Reason: {why}", f"queue {whose} {event.state}"
        case StillWaiting() if event.state not in {None, "active"} or event.waited_s >= LONG_WAIT_S:
            said = event.reason or (event.state or "nothing about its queue").replace("_", " ")
            text = (
                f"{event.request_type} {event.request_id} has been waiting for {event.waited_s:.0f} s; "
                f"the server says: {said}"
            )
            return text, f"waiting {event.client or event.request_type}"
        case HeartbeatLost():
            text = (
                f"no heartbeat of session {event.session_id} has reached the server for {event.silent_s:.0f} s; "
                "it may end the session. Check the network"
            )
            return text, f"heartbeat {event.session_id}"
        case SessionLost():
            return f"session {event.session_id} ended on the server: {event.reason}", event.session_id
        case SessionClosed() if event.error is not None:
            return (
                f"session {event.session_id} is closed, but not on the server: {event.error}",
                event.session_id,
            )
        case RunTroubled():
            return f"run {event.run_id} is {event.condition}: {event.reason}", f"trouble {event.run_id}"
        case RunRecovered():
            text = f"run {event.run_id} goes on as {event.new_run_id}, from {event.checkpoint}"
            return text, f"recovered {event.run_id}"
        case RecoveryFailed():
            then = "no more tries" if event.after_s is None else f"next try in {event.after_s:.1f} s"
            text = f"run {event.run_id} could not be restarted: {event.reason}; {then}"
            return text, f"recovery {event.run_id} {event.attempt}"
        case CircuitChanged() if event.state == "open":
            text = f"{event.base_url} keeps failing ({event.purpose}: {event.reason}); it is left alone for a moment"
            return text, f"circuit {event.purpose}"
        case StreamingUnavailable():
            text = (
                f"the server does not stream (status {event.status}); the tokens of a sample come all at once"
            )
            return text, "streaming"
        case CallbackFailed():
            return f"{event.callback} raised {event.reason}", f"callback {event.callback}"
        case _:
            return None, ""
