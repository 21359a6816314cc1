"""Fair shares: the party that was served least has the next turn."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import Generic, TypeVar

Party = TypeVar("Party", bound=Hashable)


class FairShare(Generic[Party]):
    """Shares something countable (tokens, seconds) equally between the parties that compete for it.

    Each party has an account of what it was served. The one with the lowest account has the next turn. A party that
    arrives (again) starts no lower than the last turn given, so being away earns nothing.

    >>> shares = FairShare[str]()
    >>> shares.waiting(["ada", "bob"])
    >>> shares.charge(shares.pick(["ada", "bob"]), 100)
    >>> shares.pick(["ada", "bob"])
    'bob'
    """

    def __init__(self) -> None:
        self._accounts: dict[Party, float] = {}
        self._present: set[Party] = set()
        self._level = 0.0

    def waiting(self, parties: Collection[Party]) -> None:
        """Set which parties have work now; call it before a round of :meth:`pick`."""
        for party in parties:
            if party not in self._present:
                self._accounts[party] = max(self._level, self._accounts.get(party, 0.0))
        self._present = set(parties)
        # A party that left with a debt keeps it; the rest would start at the level anyway.
        self._accounts = {
            party: account
            for party, account in self._accounts.items()
            if party in self._present or account > self._level
        }

    def pick(self, eligible: Collection[Party]) -> Party:
        """The party whose turn it is, of the waiting ones that can use it; ties go to the first named."""
        chosen = min(eligible, key=lambda party: self._accounts[party])
        self._level = max(self._level, self._accounts[chosen])
        return chosen

    def charge(self, party: Party, cost: float) -> None:
        """Add what a party was served to its account."""
        self._accounts[party] = self._accounts.get(party, self._level) + cost
