"""What passes through the API: every call is counted and timed, and logged if somebody listens.

A call is named by its endpoint, never by its address, which may hold tokens; of the caller only the user is told.
"""

from __future__ import annotations

import logging
import random
import re
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

from tinkex.types.telemetry import EventType, Severity

logger = logging.getLogger("tinkex.access")

BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper ends of the classes durations are counted in."""
EVENTS = frozenset(get_args(EventType))
SEVERITIES = frozenset(get_args(Severity))
REQUEST_ID = "x-request-id"
_ids = random.Random()  # noqa: S311 -- names in a log, no secrets; the system's own source costs a call of it each time
_ID = re.compile(r"[\w.:-]{1,64}", re.ASCII)


@dataclass
class Durations:
    """How long the calls of one endpoint took: how many ended in each class, and all seconds together."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    total_s: float = 0.0

    def add(self, seconds: float) -> None:
        """Count one call.

        >>> durations = Durations()
        >>> durations.add(0.005)
        >>> durations.add(100.0)
        >>> durations.counts[0], durations.counts[-1], durations.total_s
        (1, 1, 100.005)
        """
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.total_s += seconds


class Traffic:
    """Counts of calls since the start. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: Counter[tuple[str, int]] = Counter()
        self._durations: dict[str, Durations] = {}
        self._reports: Counter[tuple[str, str]] = Counter()

    def note(self, endpoint: str, status: int, seconds: float, request_id: str, user: str) -> None:
        """Count a call that was answered."""
        with self._lock:
            self._calls[endpoint, status] += 1
            self._durations.setdefault(endpoint, Durations()).add(seconds)
        if logger.isEnabledFor(logging.INFO):
            fields = {
                "request_id": request_id,
                "user": user,
                "operation": endpoint,
                "status": status,
                "duration_ms": round(seconds * 1000, 3),
            }
            logger.info("call", extra={"fields": fields})

    def reported(self, events: Sequence[object]) -> None:
        """Count what a client reports about itself: kind and severity, where they are those of the protocol.

        >>> traffic = Traffic()
        >>> traffic.reported([{"event": "SESSION_START", "severity": "INFO"}, {"event": "a key?"}, "nonsense"])
        >>> dict(traffic.reports)
        {('SESSION_START', 'INFO'): 1, ('other', 'other'): 2}
        """
        told = [event if isinstance(event, dict) else {} for event in events]
        with self._lock:
            for event in told:
                self._reports[
                    _one_of(EVENTS, event.get("event")), _one_of(SEVERITIES, event.get("severity"))
                ] += 1

    @property
    def reports(self) -> Mapping[tuple[str, str], int]:
        """Reports of clients by kind and severity."""
        with self._lock:
            return dict(self._reports)

    @property
    def calls(self) -> Mapping[tuple[str, int], int]:
        """Calls by endpoint and status."""
        with self._lock:
            return dict(self._calls)

    @property
    def durations(self) -> Mapping[str, Durations]:
        """Durations by endpoint."""
        with self._lock:
            return {name: Durations([*d.counts], d.total_s) for name, d in self._durations.items()}


def _one_of(known: frozenset[str], value: object) -> str:
    return value if isinstance(value, str) and value in known else "other"


def request_id_of(headers: Mapping[str, str]) -> str:
    """The id a call is known by in the log: the caller's own (X-Request-Id), if it is a plain one, else a new one.

    >>> request_id_of({"x-request-id": "trace-7"})
    'trace-7'
    >>> len(request_id_of({"x-request-id": "two words"}))
    16
    """
    given = headers.get(REQUEST_ID, "")
    return given if given and _ID.fullmatch(given) else f"{_ids.getrandbits(64):016x}"
