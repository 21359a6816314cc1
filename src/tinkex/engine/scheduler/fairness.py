"""Fair shares: the party that was served least has the next turn."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Hashable, Iterable
from typing import Generic, TypeVar

Party = TypeVar("Party", bound=Hashable)

MIN_ACCOUNTS = 64
"""So many accounts are kept without a look at whose party is absent without a debt."""


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
        self._max_accounts = MIN_ACCOUNTS

    def waiting(self, parties: Collection[Party]) -> None:
        """Set which parties have work now; call it before a round of :meth:`pick`."""
        for party in parties:
            self.arrive(party)
        for party in self._present.difference(parties):
            self.leave(party)

    def arrive(self, party: Party) -> None:
        """Let a party take part from now on."""
        if party not in self._present:
            self._present.add(party)
            self._accounts[party] = max(self._level, self._accounts.get(party, 0.0))

    def leave(self, party: Party) -> None:
        """Let a party take part no more; one that has a debt keeps it."""
        self._present.discard(party)
        if len(self._accounts) > self._max_accounts:
            # The rest would start at the level anyway.
            self._accounts = {
                each: account
                for each, account in self._accounts.items()
                if each in self._present or account > self._level
            }
            self._max_accounts = 2 * len(self._accounts) + MIN_ACCOUNTS

    def account(self, party: Party) -> float:
        """What a party was served, as far as it counts."""
        return self._accounts[party]

    def pick(self, eligible: Collection[Party]) -> Party:
        """The party whose turn it is, of the waiting ones that can use it; ties go to the first named."""
        chosen = min(eligible, key=lambda party: self._accounts[party])
        self._level = max(self._level, self._accounts[chosen])
        return chosen

    def charge(self, party: Party, cost: float) -> None:
        """Add what a party was served to its account."""
        self._accounts[party] = self._accounts.get(party, self._level) + cost


class Round(Generic[Party]):
    """Goes through waiting parties, served least first. One that was served may come again, after those served less.

    >>> shares = FairShare[str]()
    >>> shares.waiting(["ada", "bob"])
    >>> order = Round(shares, ["ada", "bob"])
    >>> first = order.next()
    >>> shares.charge(first, 100)
    >>> order.again()
    >>> first, order.next(), order.next(), order.next()
    ('ada', 'bob', 'ada', None)
    """

    def __init__(self, shares: FairShare[Party], parties: Iterable[Party]) -> None:
        self._shares = shares
        self._parties = list(parties)
        self._order = [(shares.account(party), number) for number, party in enumerate(self._parties)]
        heapq.heapify(self._order)
        self._last = 0

    def next(self) -> Party | None:
        """The next party, or None if there is no other; ties go to the first named."""
        if not self._order:
            return None
        _, self._last = heapq.heappop(self._order)
        return self._parties[self._last]

    def again(self) -> None:
        """Let the last party come again."""
        account = self._shares.account(self._parties[self._last])
        heapq.heappush(self._order, (account, self._last))
