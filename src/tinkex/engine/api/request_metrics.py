"""Request metrics: every request is counted and timed, and logged at INFO level by ``tinkex.access``.

Requests are identified by their endpoint, never by their URL, which may contain tokens. The log names the user but
nothing else of the client.
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
"""Upper bounds of the histogram buckets."""
EVENTS = frozenset(get_args(EventType))
SEVERITIES = frozenset(get_args(Severity))
REQUEST_ID = "x-request-id"
_ids = random.Random()  # noqa: S311 -- ids in a log, not secrets; os.urandom would cost a system call each
_ID = re.compile(r"[\w.:-]{1,64}", re.ASCII)


@dataclass
class Durations:
    """The histogram of one endpoint's request durations: counts per bucket, and the sum."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    total_s: float = 0.0

    def add(self, seconds: float) -> None:
        """Count one request.

        >>> durations = Durations()
        >>> durations.add(0.005)
        >>> durations.add(100.0)
        >>> durations.counts[0], durations.counts[-1], durations.total_s
        (1, 1, 100.005)
        """
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.total_s += seconds


class RequestMetrics:
    """Counts of requests since the start. Safe on any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, int]] = Counter()
        self._durations: dict[str, Durations] = {}
        self._client_events: Counter[tuple[str, str]] = Counter()

    def record(self, endpoint: str, status: int, seconds: float, request_id: str, user: str) -> None:
        """Count a request that was answered."""
        with self._lock:
            self._counts[endpoint, status] += 1
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

    def record_client_events(self, events: Sequence[object]) -> None:
        """Count telemetry events of a client by type and severity; values that are not in the protocol count as other.

        >>> metrics = RequestMetrics()
        >>> metrics.record_client_events([{"event": "SESSION_START", "severity": "INFO"}, {"event": "a key?"}, "nonsense"])
        >>> dict(metrics.client_events)
        {('SESSION_START', 'INFO'): 1, ('other', 'other'): 2}
        """
        parsed = [event if isinstance(event, dict) else {} for event in events]
        with self._lock:
            for event in parsed:
                self._client_events[
                    _one_of(EVENTS, event.get("event")), _one_of(SEVERITIES, event.get("severity"))
                ] += 1

    @property
    def client_events(self) -> Mapping[tuple[str, str], int]:
        """Telemetry events of clients by type and severity."""
        with self._lock:
            return dict(self._client_events)

    @property
    def counts(self) -> Mapping[tuple[str, int], int]:
        """Requests by endpoint and status."""
        with self._lock:
            return dict(self._counts)

    @property
    def durations(self) -> Mapping[str, Durations]:
        """Durations by endpoint."""
        with self._lock:
            return {name: Durations([*d.counts], d.total_s) for name, d in self._durations.items()}


def _one_of(known: frozenset[str], value: object) -> str:
    return value if isinstance(value, str) and value in known else "other"


def request_id_of(headers: Mapping[str, str]) -> str:
    """Returns the id of a request in the log: the client's X-Request-Id if it is valid, or a new one.

    >>> request_id_of({"x-request-id": "trace-7"})
    'trace-7'
    >>> len(request_id_of({"x-request-id": "two words"}))
    16
    """
    given = headers.get(REQUEST_ID, "")
    return given if given and _ID.fullmatch(given) else f"{_ids.getrandbits(64):016x}"
