"""The engine's health: ready, starting or degraded, with reasons for its operator."""

from __future__ import annotations

import threading
from collections.abc import Collection


class Health:
    """Current problems by subject. Safe on any thread.

    >>> health = Health()
    >>> health.status
    'ok'
    >>> health.trouble("journal", "the disk is full")
    >>> health.status
    'degraded: the disk is full'
    >>> health.fine("journal")
    >>> health.starting("models are being loaded")
    >>> health.status, health.state
    ('starting: models are being loaded', 'starting')
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._troubles: dict[str, str] = {}
        self._starting: str | None = None

    def starting(self, reason: str) -> None:
        """Record that requests wait, and for what."""
        with self._lock:
            self._starting = reason

    def started(self) -> None:
        """Record that start-up is complete."""
        with self._lock:
            self._starting = None

    def trouble(self, subject: str, reason: str) -> None:
        """Record a problem."""
        with self._lock:
            self._troubles[subject] = reason

    def fine(self, subject: str) -> None:
        """Clear a problem."""
        with self._lock:
            self._troubles.pop(subject, None)

    def note(self, subject: str, reason: str | None) -> None:
        """Record a problem, or clear it with None."""
        if reason is None:
            self.fine(subject)
        else:
            self.trouble(subject, reason)

    @property
    def status(self) -> str:
        """``ok`` for ready, or ``starting`` or ``degraded`` with the reasons."""
        with self._lock:
            if self._starting is not None:
                return f"starting: {self._starting}"
            return "degraded: " + "; ".join(self._troubles.values()) if self._troubles else "ok"

    @property
    def state(self) -> str:
        """``starting``, ``ready`` or ``degraded``."""
        return {"ok": "ready"}.get(self.status, self.status.partition(":")[0])

    @property
    def troubles(self) -> Collection[str]:
        """The subjects that have a problem."""
        with self._lock:
            return list(self._troubles)
