"""What is wrong with the engine at the moment, in words for whoever looks after it."""

from __future__ import annotations

import threading


class Health:
    """Troubles by subject; they come and go. Safe to use from any thread.

    >>> health = Health()
    >>> health.status
    'ok'
    >>> health.trouble("journal", "the disk is full")
    >>> health.status
    'degraded: the disk is full'
    >>> health.fine("journal")
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._troubles: dict[str, str] = {}

    def trouble(self, subject: str, reason: str) -> None:
        """Note what does not work."""
        with self._lock:
            self._troubles[subject] = reason

    def fine(self, subject: str) -> None:
        """Note that it works (again)."""
        with self._lock:
            self._troubles.pop(subject, None)

    @property
    def status(self) -> str:
        """``ok``, or ``degraded`` with the reasons."""
        with self._lock:
            return "degraded: " + "; ".join(self._troubles.values()) if self._troubles else "ok"
