"""How fast each user may go: so many tokens a second, and a little ahead of that."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Party = TypeVar("Party", bound=Hashable)

AHEAD_S = 10.0
"""How many seconds' worth of tokens a party may have taken in advance; one operation more than that goes, of any size."""


class Pace(Generic[Party]):
    """Counts what parties took against what the seconds brought them. Without a rate there is no limit.

    >>> pace = Pace[str](100, clock=lambda: 0.0)
    >>> pace.charge("ada", 1500)
    >>> pace.wait_s("ada"), pace.wait_s("bob")
    (5.0, 0.0)
    """

    def __init__(self, tokens_per_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = tokens_per_s
        self._clock = clock
        self._paid_until: dict[Party, float] = {}

    def wait_s(self, party: Party) -> float:
        """How long a party has to wait before it may take more; 0 if it may now."""
        return max(0.0, self._paid_until.get(party, 0.0) - self._clock() - AHEAD_S)

    def charge(self, party: Party, tokens: int) -> None:
        """Note that a party took so many tokens, or with a negative number that it gives some back."""
        if self._rate is None:
            return
        now = self._clock()
        paid_until = max(self._paid_until.get(party, now), now) + tokens / self._rate
        if paid_until > now:
            self._paid_until[party] = paid_until
        else:
            self._paid_until.pop(party, None)
