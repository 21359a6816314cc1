"""Limits how often a line is logged about something that may happen many times a second."""

from __future__ import annotations

import threading
import time

LOG_INTERVAL_S = 60.0


class LogLimit:
    """Admits one line per interval, and counts what happened since the one before. Safe on any thread.

    >>> limit = LogLimit(interval_s=60)
    >>> limit.count(now=0.0), limit.count(now=1.0), limit.count(now=61.0)
    (1, 0, 2)
    """

    def __init__(self, interval_s: float = LOG_INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._logged_at = float("-inf")
        self._total = 0

    def count(self, number: int = 1, now: float | None = None) -> int:
        """Count something; returns the number since the last line if a line is due, else 0."""
        now = time.monotonic() if now is None else now
        with self._lock:
            self._total += number
            if now - self._logged_at < self._interval_s:
                return 0
            self._logged_at, total, self._total = now, self._total, 0
            return total
