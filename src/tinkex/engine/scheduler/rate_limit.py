"""A limit on tokens per second for each user, with a burst allowance."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Party = TypeVar("Party", bound=Hashable)

BURST_S = 10.0
"""How many seconds' worth of tokens a party may take in advance; one operation more than that is admitted, of any size."""


class TokenRate(Generic[Party]):
    """Counts the tokens that parties took against a rate. Without a rate there is no limit.

    >>> rate = TokenRate[str](100, clock=lambda: 0.0)
    >>> rate.charge("ada", 1500)
    >>> rate.wait_s("ada"), rate.wait_s("bob")
    (5.0, 0.0)
    """

    def __init__(self, tokens_per_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = tokens_per_s
        self._clock = clock
        self._paid_until: dict[Party, float] = {}

    def wait_s(self, party: Party) -> float:
        """How long a party has to wait before it may take more; 0 if it may now."""
        return max(0.0, self._paid_until.get(party, 0.0) - self._clock() - BURST_S)

    def charge(self, party: Party, tokens: int) -> None:
        """Count tokens that a party took, or with a negative number tokens it returns."""
        if self._rate is None:
            return
        now = self._clock()
        paid_until = max(self._paid_until.get(party, now), now) + tokens / self._rate
        if paid_until > now:
            self._paid_until[party] = paid_until
        else:
            self._paid_until.pop(party, None)
