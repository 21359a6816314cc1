"""Telemetry events of a client."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal, TypeAlias

import msgspec

from tinkex.types.base import Value

__all__ = [
    "EventType",
    "GenericEvent",
    "SessionEndEvent",
    "SessionStartEvent",
    "Severity",
    "TelemetryBatch",
    "TelemetryEvent",
    "TelemetryResponse",
    "TelemetrySendRequest",
    "UnhandledExceptionEvent",
]

EventType = Literal["SESSION_START", "SESSION_END", "UNHANDLED_EXCEPTION", "GENERIC_EVENT"]
Severity = Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]


class SessionStartEvent(Value, frozen=True, kw_only=True):
    """A session started."""

    event: EventType
    event_id: str
    event_session_index: int
    severity: Severity
    timestamp: datetime


class SessionEndEvent(Value, frozen=True, kw_only=True):
    """A session ended."""

    duration: str
    event: EventType
    event_id: str
    event_session_index: int
    severity: Severity
    timestamp: datetime


class UnhandledExceptionEvent(Value, frozen=True, kw_only=True):
    """The program ended with an exception."""

    error_message: str
    error_type: str
    event: EventType
    event_id: str
    event_session_index: int
    severity: Severity
    timestamp: datetime
    traceback: str | None = None


class GenericEvent(Value, frozen=True, kw_only=True):
    """A named event."""

    event: EventType
    event_id: str
    event_name: str
    event_session_index: int
    severity: Severity
    timestamp: datetime
    event_data: dict[str, Any] = msgspec.field(default_factory=dict)


TelemetryEvent: TypeAlias = SessionStartEvent | SessionEndEvent | UnhandledExceptionEvent | GenericEvent


class TelemetryBatch(Value, frozen=True, kw_only=True):
    """Events of one process."""

    events: list[Any]
    """Telemetry events; our server counts them by kind and severity, so the rest of them is not checked."""
    platform: str
    sdk_version: str
    session_id: str
    process_uuid: str


class TelemetrySendRequest(Value, frozen=True, kw_only=True):
    """Sends events of one process to a server."""

    events: list[Any]
    """Telemetry events; our server counts them by kind and severity, so the rest of them is not checked."""
    platform: str = ""
    sdk_version: str = ""
    session_id: str = ""
    process_uuid: str | None = None


class TelemetryResponse(Value, frozen=True, kw_only=True):
    """The server accepted the telemetry."""

    status: Literal["accepted"] = "accepted"
