"""How many samplers there should be: more while samples wait for a place, fewer when fewer are enough."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

ADD_AFTER_S = 2.0
"""How long samples must have waited before a sampler is added for them."""
RETRY_AFTER_S = 30.0
"""How long no sampler is added after there was no room for one."""
SPARE = 2
"""A sampler is removed if the others would then have so many times the places that are needed."""


@dataclass(frozen=True)
class Demand:
    """The samples of one base model: those that wait, and the sequences that are decoded."""

    waiting: int
    decoding: int

    def samplers(self, places: float) -> int:
        """How many samplers with so many places it fills."""
        return int(-(-(self.waiting + self.decoding) // places))


class SamplerScaling:
    """Decides how many samplers there should be. It is pure: times are given, in seconds of one clock.

    Each sampler decodes ``places`` sequences of every base model at a time. One that has been started counts, so that no more
    are started for the same samples.

    >>> scaling = SamplerScaling(fewest=1, most=4, places=10, idle_s=60.0)
    >>> busy, idle = [Demand(waiting=15, decoding=10)], [Demand(waiting=0, decoding=3)]
    >>> [scaling.wanted(busy, number=1, now=now) for now in (0.0, 1.0, 2.0)]
    [1, 1, 3]
    >>> [scaling.wanted(idle, number=3, now=now) for now in (10.0, 69.0, 70.0)]
    [3, 3, 1]
    """

    def __init__(self, *, fewest: int, most: int, places: int, idle_s: float) -> None:
        self._fewest = fewest
        self._most = most
        self._places = places
        self._idle_s = idle_s
        self._short_since: float | None = None
        self._spare_since: float | None = None
        self._peak = 0
        """The most samplers that were needed since there are some to spare."""
        self._refused_until = float("-inf")

    def wanted(self, demands: Collection[Demand], number: int, now: float) -> int:
        """How many samplers there should be now, if there are ``number``, those that start included."""
        needed = max((each.samplers(self._places) for each in demands if each.waiting), default=0)
        needed = min(needed, self._most)
        if needed <= number or now < self._refused_until:
            self._short_since = None
        else:
            if self._short_since is None:
                self._short_since = now
            if not number or now - self._short_since >= ADD_AFTER_S:
                self._short_since = self._spare_since = None
                return needed
        enough = max((each.samplers(self._places / SPARE) for each in demands), default=0)
        enough = max(enough, self._fewest)
        if enough >= number:
            self._spare_since = None
            return number
        if self._spare_since is None:
            self._spare_since, self._peak = now, enough
        self._peak = max(self._peak, enough)
        if now - self._spare_since < self._idle_s:
            return number
        self._spare_since = None
        return self._peak

    def refuse(self, now: float) -> None:
        """There was no room for one more: try again later."""
        self._refused_until = now + RETRY_AFTER_S
