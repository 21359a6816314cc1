"""Redaction: an allow-list of the fields that telemetry may send, which hold no user data."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tinkex.observability.events import (
    CircuitChanged,
    HeartbeatLost,
    QueueStateChanged,
    SessionLost,
    StillWaiting,
    StreamingUnavailable,
)

__all__ = ["allowed", "event_data", "frames"]

REPORTED: Mapping[type[Any], tuple[str, ...]] = {
    QueueStateChanged: ("request_type", "state"),
    StillWaiting: ("request_type", "waited_s", "state"),
    HeartbeatLost: ("silent_s",),
    SessionLost: (),
    CircuitChanged: ("purpose", "state"),
    StreamingUnavailable: ("status",),
}
"""The events that are reported, and the fields of each; free text, which may quote user data, is excluded."""

ALLOWED_DATA = frozenset(
    {"request_type", "state", "waited_s", "silent_s", "purpose", "status", "endpoint", "error_type"}
    | {"status_code", "category", "count", "duration_s", "step"}
)
MAX_TEXT_LENGTH = 100
PACKAGE = Path(__file__).parents[2]


def event_data(event: object) -> dict[str, Any] | None:
    """Returns the reported fields of an event, or None if the event is not reported.

    >>> event_data(StreamingUnavailable("session-1:sample:0", 404))
    {'status': 404}
    """
    names = REPORTED.get(type(event))
    return None if names is None else {name: getattr(event, name) for name in names}


def allowed(data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the part of a user's data that may be sent: known names with numbers or short words.

    >>> allowed({"step": 3, "prompt": "secret", "state": {"deep": 1}})
    {'step': 3}
    """
    return {
        name: value
        for name, value in data.items()
        if name in ALLOWED_DATA
        and (
            isinstance(value, int | float | None)
            or (isinstance(value, str) and len(value) <= MAX_TEXT_LENGTH and value.replace("_", "").isalnum())
        )
    }


def frames(error: BaseException) -> str:
    """Returns the stack frames of an exception: those of this package, and only the number of all others."""
    lines: list[str] = []
    skipped = 0
    for frame in traceback.extract_tb(error.__traceback__):
        path = Path(frame.filename)
        if path.is_relative_to(PACKAGE):
            lines.append(f"{path.relative_to(PACKAGE)}:{frame.lineno} in {frame.name}")
        else:
            skipped += 1
    return "\n".join([*lines, f"and {skipped} frames of other code"])
