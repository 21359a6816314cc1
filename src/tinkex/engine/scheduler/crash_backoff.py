"""Delays for users whose operations crash the worker: they wait longer with every crash, and no other user does."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Generic, TypeVar

Party = TypeVar("Party", bound=Hashable)

MIN_DELAY_S = 1.0
MAX_DELAY_S = 600.0
FORGET_AFTER_S = 3600.0
"""How long a party must not crash the worker for its crashes to be forgotten."""


@dataclass
class _Record:
    num_crashes: int
    crashed_at: float
    until: float


class CrashBackoff(Generic[Party]):
    """Counts the crashes that parties cause, and how long each has to wait: twice as long with every crash.

    >>> backoff = CrashBackoff[str](clock=lambda: 0.0)
    >>> for _ in range(3):
    ...     backoff.record("ada")
    >>> backoff.wait_s("ada"), backoff.wait_s("bob"), backoff.delayed
    (4.0, 0.0, frozenset({'ada'}))
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._records: dict[Party, _Record] = {}

    def record(self, party: Party) -> None:
        """Count a crash, and start the party's delay."""
        now = self._clock()
        self._records = {
            each: record for each, record in self._records.items() if now - record.crashed_at < FORGET_AFTER_S
        }
        known = self._records.get(party)
        num_crashes = known.num_crashes + 1 if known is not None else 1
        self._records[party] = _Record(num_crashes, now, now + _delay_s(num_crashes))

    def restore(self, party: Party, num_crashes: int, age_s: float) -> None:
        """Set the crashes of a party, of which the last one was ``age_s`` ago.

        >>> backoff = CrashBackoff[str](clock=lambda: 0.0)
        >>> backoff.restore("ada", num_crashes=3, age_s=1.5)
        >>> backoff.wait_s("ada")
        2.5
        """
        crashed_at = self._clock() - max(0.0, age_s)
        self._records[party] = _Record(num_crashes, crashed_at, crashed_at + _delay_s(num_crashes))

    def num_crashes(self, party: Party) -> int:
        """How many crashes are counted against a party."""
        known = self._records.get(party)
        return known.num_crashes if known is not None else 0

    def wait_s(self, party: Party) -> float:
        """How long a party has to wait; 0 if it need not."""
        known = self._records.get(party)
        return max(0.0, known.until - self._clock()) if known is not None else 0.0

    @property
    def delayed(self) -> AbstractSet[Party]:
        """The parties that have to wait now."""
        now = self._clock()
        return frozenset(party for party, record in self._records.items() if record.until > now)

    @property
    def next_deadline(self) -> float | None:
        """When the next delay ends, by the clock; None if no user is delayed."""
        now = self._clock()
        return min((each.until for each in self._records.values() if each.until > now), default=None)


def _delay_s(num_crashes: int) -> float:
    return min(MIN_DELAY_S * 2.0 ** min(num_crashes - 1, 30), MAX_DELAY_S)
