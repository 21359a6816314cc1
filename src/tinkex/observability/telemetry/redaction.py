"""What may leave the program: fields that are known to hold no data of the user's, and nothing else."""

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
"""Which events are reported, and which of their fields; texts that quote addresses, names or data are not."""

ALLOWED_DATA = frozenset(
    {"request_type", "state", "waited_s", "silent_s", "purpose", "status", "endpoint", "error_type"}
    | {"status_code", "category", "count", "duration_s", "step"}
)
LONGEST_TEXT = 100
PACKAGE = Path(__file__).parents[2]


def event_data(event: object) -> dict[str, Any] | None:
    """The fields of an event that are reported, or None if it is not.

    >>> event_data(StreamingUnavailable("session-1:sample:0", 404))
    {'status': 404}
    """
    names = REPORTED.get(type(event))
    return None if names is None else {name: getattr(event, name) for name in names}


def allowed(data: Mapping[str, Any]) -> dict[str, Any]:
    """What of a user's own data is sent: known names with numbers or short words.

    >>> allowed({"step": 3, "prompt": "secret", "state": {"deep": 1}})
    {'step': 3}
    """
    return {
        name: value
        for name, value in data.items()
        if name in ALLOWED_DATA
        and (
            isinstance(value, int | float | None)
            or (isinstance(value, str) and len(value) <= LONGEST_TEXT and value.replace("_", "").isalnum())
        )
    }


def frames(error: BaseException) -> str:
    """Where an exception came from: lines of this package, and only the number of all others."""
    lines: list[str] = []
    skipped = 0
    for frame in traceback.extract_tb(error.__traceback__):
        path = Path(frame.filename)
        if path.is_relative_to(PACKAGE):
            lines.append(f"{path.relative_to(PACKAGE)}:{frame.lineno} in {frame.name}")
        else:
            skipped += 1
    return "\n".join([*lines, f"and {skipped} frames of other code"])
