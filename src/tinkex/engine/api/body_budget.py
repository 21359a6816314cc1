"""Memory budgets of bodies: that of a request counts until it is answered, that of a large reply until it is sent."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field

from tinkex.errors import Busy, OverQuota


class BodyBudget:
    """Counts the bytes of bodies in memory, per user and in total; one body of any size fits. Safe on any thread."""

    def __init__(
        self,
        max_bytes_per_user: int,
        max_bytes: int,
        what: str = "bodies",
        advice: str = "send fewer or smaller ones at the same time",
    ) -> None:
        self._max_bytes_per_user = max_bytes_per_user
        self._max_bytes = max_bytes
        self._what, self._advice = what, advice
        self._lock = threading.Lock()
        self._by_user: Counter[str] = Counter()
        self._total = 0

    def add(self, reservation: BodyReservation, num_bytes: int) -> None:
        """Count more bytes of a request; raises :class:`OverQuota` or :class:`Busy` if they are too many."""
        owner = reservation.owner
        with self._lock:
            if reservation.released:
                return  # its caller is gone
            own, total, mine = self._by_user[owner], self._total, reservation.num_bytes
            if own > mine and own + num_bytes > self._max_bytes_per_user:
                raise OverQuota(
                    f"your requests have more than {self._max_bytes_per_user} bytes of {self._what} in flight, which is this "
                    f"server's limit per user; {self._advice}."
                )
            if total > mine and total + num_bytes > self._max_bytes:
                raise Busy(
                    f"the requests of all users have more than {self._max_bytes} bytes of {self._what} in flight, which is "
                    "this server's limit; send it again later."
                )
            reservation.num_bytes += num_bytes
            self._by_user[owner] += num_bytes
            self._total += num_bytes

    def release(self, reservation: BodyReservation) -> None:
        """Stop counting the bytes of a request."""
        with self._lock:
            reservation.released = True
            self._total -= reservation.num_bytes
            self._by_user[reservation.owner] -= reservation.num_bytes
            if not self._by_user[reservation.owner]:
                del self._by_user[reservation.owner]
            reservation.num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """The bytes of all users."""
        return self._total


@dataclass
class BodyReservation:
    """The bytes of one request.

    >>> budget = BodyBudget(max_bytes_per_user=100, max_bytes=1000)
    >>> reservation = BodyReservation(budget, "ada")
    >>> reservation.add(80)
    >>> budget.num_bytes
    80
    >>> reservation.release()
    >>> budget.num_bytes
    0
    """

    budget: BodyBudget
    owner: str
    num_bytes: int = field(default=0, init=False)
    released: bool = field(default=False, init=False)

    def add(self, num_bytes: int) -> None:
        """Count more bytes; raises :class:`OverQuota` or :class:`Busy` if they are too many."""
        self.budget.add(self, num_bytes)

    def release(self) -> None:
        """Stop counting the bytes."""
        self.budget.release(self)
