"""What is wrong with the engine at the moment, in words for whoever looks after it."""

from __future__ import annotations

import threading
from collections.abc import Collection


class Health:
    """Troubles by subject; they come and go. Safe to use from any thread.

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
        """Note that what is asked of the engine waits, and for what."""
        with self._lock:
            self._starting = reason

    def started(self) -> None:
        """Note that everything is there."""
        with self._lock:
            self._starting = None

    def trouble(self, subject: str, reason: str) -> None:
        """Note what does not work."""
        with self._lock:
            self._troubles[subject] = reason

    def fine(self, subject: str) -> None:
        """Note that it works (again)."""
        with self._lock:
            self._troubles.pop(subject, None)

    def note(self, subject: str, reason: str | None) -> None:
        """Note what does not work, or with None that it works (again)."""
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
        """The subjects that do not work."""
        with self._lock:
            return list(self._troubles)
