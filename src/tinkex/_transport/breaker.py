"""The circuit breaker: a server that keeps failing is left alone for a moment, instead of being asked again and again.

One breaker per server and endpoint class sits below the retry policy: while it is open a try fails at once,
without a request, and the policy decides as after any other failure.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Literal, TypeAlias

from tinkex._wire.endpoints import Purpose

__all__ = ["Breaker", "Breakers", "Passing", "breakers", "is_failure"]

FAILURES = 5
"""So many in a row, with no success between them, open a breaker."""
RESET_S = 5.0
"""How long an open breaker stays so before one call may try."""
PROBE_S = 0.5
"""How soon those that are turned away while one call tries may ask again; nobody knows how long it takes."""
MOST_BREAKERS = 512

State: TypeAlias = Literal["closed", "open", "half_open"]


def is_failure(status: int) -> bool:
    """Whether an answer says that the server is in trouble; refusals (4xx, 501 and 507) say that it is well.

    >>> [status for status in (200, 400, 404, 408, 429, 500, 501, 503, 507) if is_failure(status)]
    [500, 503]
    """
    return status >= 500 and status not in {501, 507}


class Breaker:
    """Counts failures of one endpoint class of one server; every method may be called from any thread.

    >>> breaker = Breaker(failures=2, clock=lambda: 0.0)
    >>> for _ in range(2):
    ...     passing = breaker.enter()
    ...     _ = passing and passing.failed("connection refused")
    >>> breaker.state, breaker.enter()
    ('open', None)
    """

    def __init__(
        self,
        *,
        failures: int = FAILURES,
        reset_s: float = RESET_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most = failures
        self._reset_s = reset_s
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._opened_at: float | None = None
        self._probe: Passing | None = None
        self.reason = ""
        """What failed last."""

    @property
    def state(self) -> State:
        """``half_open`` is an open breaker whose time is over: it lets one call through."""
        with self._lock:
            if self._opened_at is None:
                return "closed"
            return "half_open" if self._left() <= 0 else "open"

    @property
    def left_s(self) -> float:
        """Seconds until it is worth asking again: the next call is let through, or the one that probes may have ended."""
        with self._lock:
            return max(self._left(), 0.0 if self._probe is None else PROBE_S)

    def enter(self) -> Passing | None:
        """Lets a call through, or not (None); tell the passing how the call ended."""
        with self._lock:
            if self._opened_at is None:
                return Passing(self)
            if self._left() > 0 or self._probe is not None:
                return None
            self._probe = Passing(self)
            return self._probe

    def ended(self, passing: Passing, failure: str | None, *, known: bool) -> State | None:
        """Notes how a call ended; says which state that led to, if it is another one."""
        with self._lock:
            if self._opened_at is not None:
                if passing is not self._probe:
                    return None  # it began before the breaker opened: only the probe counts
                self._probe = None
                if not known:
                    return None  # nobody waited for its end: the next call is the probe
                if failure is not None:
                    self._opened_at, self.reason = self._clock(), failure
                    return "open"
                self._opened_at, self._failures = None, 0
                return "closed"
            if not known:
                return None
            self._failures = 0 if failure is None else self._failures + 1
            if failure is None or self._failures < self._most:
                return None
            self._opened_at, self.reason = self._clock(), failure
            return "open"

    def _left(self) -> float:
        return 0.0 if self._opened_at is None else self._opened_at + self._reset_s - self._clock()


class Passing:
    """One call that was let through; it ends in one of three ways."""

    __slots__ = ("_breaker", "_over")

    def __init__(self, breaker: Breaker) -> None:
        self._breaker = breaker
        self._over = False

    def succeeded(self) -> State | None:
        """The server answered, and is well."""
        return self._end(None, known=True)

    def failed(self, reason: str) -> State | None:
        """The server did not answer, or said that it is in trouble."""
        return self._end(reason, known=True)

    def abandoned(self) -> None:
        """Nobody waited for the end; after one of the others it does nothing."""
        self._end(None, known=False)

    def _end(self, failure: str | None, *, known: bool) -> State | None:
        if self._over:
            return None
        self._over = True
        return self._breaker.ended(self, failure, known=known)


class Breakers:
    """The breakers of many servers; the one that was used longest ago gives way when there are too many.

    >>> known = Breakers(most=1)
    >>> known.of("http://a", "rest") is known.of("http://a", "rest")
    True
    """

    def __init__(
        self, *, most: int = MOST_BREAKERS, failures: int = FAILURES, reset_s: float = RESET_S
    ) -> None:
        self._most = most
        self._failures = failures
        self._reset_s = reset_s
        self._lock = threading.Lock()
        self._breakers: OrderedDict[tuple[int, str, Purpose], Breaker] = OrderedDict()

    def of(self, server: str, purpose: Purpose) -> Breaker:
        """The breaker of an endpoint class of a server."""
        place = (os.getpid(), server, purpose)  # a forked child finds out for itself
        with self._lock:
            breaker = self._breakers.get(place)
            if breaker is None:
                breaker = Breaker(failures=self._failures, reset_s=self._reset_s)
                self._breakers[place] = breaker
                if len(self._breakers) > self._most:
                    self._breakers.popitem(last=False)
            else:
                self._breakers.move_to_end(place)
            return breaker

    def unlock(self) -> None:
        """For a forked child: a thread that held the lock, or a breaker's, is not there to give it back."""
        self._lock = threading.Lock()
        self._breakers = OrderedDict()

    def states(self) -> dict[tuple[str, Purpose], State]:
        """The state of every breaker of this process, by server and endpoint class."""
        with self._lock:
            known = [(place, breaker) for place, breaker in self._breakers.items() if place[0] == os.getpid()]
        return {(server, purpose): breaker.state for (_, server, purpose), breaker in known}


breakers = Breakers()
"""Those of this process: what one client learns about a server, all know."""

if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
    os.register_at_fork(after_in_child=breakers.unlock)
