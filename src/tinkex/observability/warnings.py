"""The text of the events that a user should see, as the log shows them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinkex.observability.events import (
    CallbackFailed,
    CallbacksDropped,
    CallbackSlow,
    CircuitChanged,
    HeartbeatFailed,
    HeartbeatLost,
    QueueStateChanged,
    RecoveryFailed,
    RetryScheduled,
    RunRecovered,
    RunUnhealthy,
    SessionClosed,
    SessionLost,
    StillWaiting,
    StreamingUnavailable,
    TelemetryDataDropped,
)

if TYPE_CHECKING:
    from tinkex.observability.events import Event

__all__ = ["warning_for"]

SAMPLING = "Sample"
"""The request type of samples; all others belong to training."""

REASONS = {
    ("Sampling", "paused_rate_limit"): "the limit of concurrent samplers is reached",
    ("Training", "paused_rate_limit"): "the limit of concurrent training runs is reached",
    ("Sampling", "paused_capacity"): "the server is short of capacity, please wait",
    ("Training", "paused_capacity"): "the server is short of capacity, please wait",
}
"""The reason to log for a pause if the server gives none."""

LONG_WAIT_S = 600.0
"""A result pending for this long is logged as a warning, even if its queue is active."""


def warning_for(event: Event, quiet_attempts: int) -> tuple[str | None, str]:
    """Returns the warning for an event, or None, and the kind by which repetitions are rate-limited.

    Of the retries of a request, the first ``quiet_attempts`` give none.
    """
    match event:
        case RetryScheduled() if event.attempt >= quiet_attempts:
            text = f"{event.endpoint}: {event.reason}; attempt {event.attempt + 2} in {event.after_s:.1f} s"
            return text, f"retry {event.endpoint}"
        case QueueStateChanged() if event.state != "active":
            work = "Sampling" if event.request_type == SAMPLING else "Training"
            why = event.reason or REASONS.get((work, event.state), "the server gives no reason")
            owner = event.client or event.request_id
            return f"{work} is paused for {owner}. Reason: {why}", f"queue {owner} {event.state}"
        case StillWaiting() if event.state not in {None, "active"} or event.waited_s >= LONG_WAIT_S:
            state = event.reason or (event.state or "unknown").replace("_", " ")
            text = (
                f"{event.request_type} {event.request_id} has been waiting for {event.waited_s:.0f} s; "
                f"queue state: {state}"
            )
            return text, f"waiting {event.client or event.request_type}"
        case HeartbeatLost():
            text = (
                f"no heartbeat of session {event.session_id} has reached the server for {event.silent_s:.0f} s; "
                "the server may end the session. Check the network"
            )
            return text, f"heartbeat {event.session_id}"
        case HeartbeatFailed():
            text = f"a heartbeat of session {event.session_id} failed: {event.reason}; the next one is sent as usual"
            return text, f"heartbeat failed {event.session_id}"
        case SessionLost():
            return f"session {event.session_id} ended on the server: {event.reason}", event.session_id
        case SessionClosed() if event.error is not None:
            return (
                f"session {event.session_id} is closed, but not on the server: {event.error}",
                event.session_id,
            )
        case RunUnhealthy():
            return f"run {event.run_id} is {event.condition}: {event.reason}", f"unhealthy {event.run_id}"
        case RunRecovered():
            text = f"run {event.run_id} continues as {event.new_run_id}, from {event.checkpoint}"
            return text, f"recovered {event.run_id}"
        case RecoveryFailed():
            then = "giving up" if event.after_s is None else f"next attempt in {event.after_s:.1f} s"
            text = f"run {event.run_id} could not be restarted: {event.reason}; {then}"
            return text, f"recovery {event.run_id} {event.attempt}"
        case CircuitChanged() if event.state == "open":
            what = event.endpoint or event.purpose
            text = f"{event.base_url} keeps failing ({what}: {event.reason}); circuit open, calls are paused"
            return text, f"circuit {event.base_url} {what}"
        case TelemetryDataDropped():
            text = (
                f"telemetry event {event.event_name!r}: the fields {', '.join(map(repr, event.fields))} are not sent; "
                "values are numbers, booleans, None or strings of at most 200 characters"
            )
            return text, f"telemetry {event.event_name}"
        case StreamingUnavailable():
            text = f"the server does not stream (status {event.status}); a sample's tokens are delivered all together"
            return text, "streaming"
        case CallbackSlow():
            text = (
                f"{event.callback} takes {event.elapsed_s:.1f} s; later callbacks of this client wait for it"
            )
            return text, f"slow {event.callback}"
        case CallbacksDropped():
            text = f"{event.callback} is too slow: {event.count} events were not delivered to it"
            return text, f"dropped {event.callback}"
        case CallbackFailed():
            return f"{event.callback} raised {event.reason}", f"callback {event.callback}"
        case _:
            return None, ""
