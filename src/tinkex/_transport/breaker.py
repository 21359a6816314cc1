"""The circuit breaker: after several failures in a row, calls to a server fail without a request for a few seconds.

There is one breaker per server and purpose, below the retry policy: while it is open an attempt fails immediately,
and the policy decides as after any other failure.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Literal, TypeAlias

from tinkex._wire.endpoints import Purpose

__all__ = ["Breaker", "BreakerRegistry", "Permit", "breakers", "is_failure"]

FAILURE_THRESHOLD = 5
"""So many failures in a row, with no success between them, open a breaker."""
RESET_TIMEOUT_S = 5.0
"""How long a breaker stays open before it lets a probe through."""
PROBE_RETRY_S = 0.5
"""When calls that are rejected during a probe are worth another attempt; how long the probe takes is unknown."""
MAX_BREAKERS = 512

State: TypeAlias = Literal["closed", "open", "half_open"]


def is_failure(status: int) -> bool:
    """Whether a status means that the server is failing; 4xx, 501 and 507 do not.

    >>> [status for status in (200, 400, 404, 408, 429, 500, 501, 503, 507) if is_failure(status)]
    [500, 503]
    """
    return status >= 500 and status not in {501, 507}


class Breaker:
    """Counts the failures of one purpose of one server; thread-safe.

    >>> breaker = Breaker(failure_threshold=2, clock=lambda: 0.0)
    >>> for _ in range(2):
    ...     permit = breaker.acquire()
    ...     _ = permit and permit.failed("connection refused")
    >>> breaker.state, breaker.acquire()
    ('open', None)
    """

    def __init__(
        self,
        *,
        failure_threshold: int = FAILURE_THRESHOLD,
        reset_timeout_s: float = RESET_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._failure_threshold = failure_threshold
        self._reset_timeout_s = reset_timeout_s
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._opened_at: float | None = None
        self._probe: Permit | None = None
        self.reason = ""
        """The last failure."""

    @property
    def state(self) -> State:
        """``half_open`` is an open breaker whose reset timeout is over: it lets one call through."""
        with self._lock:
            if self._opened_at is None:
                return "closed"
            return "half_open" if self._remaining_s() <= 0 else "open"

    @property
    def retry_after_s(self) -> float:
        """Seconds until another attempt is worthwhile: the breaker lets a call through, or the probe may have ended."""
        with self._lock:
            return max(self._remaining_s(), 0.0 if self._probe is None else PROBE_RETRY_S)

    def acquire(self) -> Permit | None:
        """Returns a permit for one call, or None while the breaker is open; report to the permit how the call ended."""
        with self._lock:
            if self._opened_at is None:
                return Permit(self)
            if self._remaining_s() > 0 or self._probe is not None:
                return None
            self._probe = Permit(self)
            return self._probe

    def record(self, permit: Permit, failure: str | None, *, known: bool) -> State | None:
        """Records how a call ended; returns the new state if that changed."""
        with self._lock:
            if self._opened_at is not None:
                if permit is not self._probe:
                    return None  # it began before the breaker opened: only the probe counts
                self._probe = None
                if not known:
                    return None  # the next call is the probe
                if failure is not None:
                    self._opened_at, self.reason = self._clock(), failure
                    return "open"
                self._opened_at, self._failures = None, 0
                return "closed"
            if not known:
                return None
            self._failures = 0 if failure is None else self._failures + 1
            if failure is None or self._failures < self._failure_threshold:
                return None
            self._opened_at, self.reason = self._clock(), failure
            return "open"

    def _remaining_s(self) -> float:
        return 0.0 if self._opened_at is None else self._opened_at + self._reset_timeout_s - self._clock()


class Permit:
    """One call that a breaker let through; only the first report counts."""

    __slots__ = ("_breaker", "_reported")

    def __init__(self, breaker: Breaker) -> None:
        self._breaker = breaker
        self._reported = False

    def succeeded(self) -> State | None:
        """The server replied and is not failing."""
        return self._report(None, known=True)

    def failed(self, reason: str) -> State | None:
        """The server did not reply, or replied that it is failing."""
        return self._report(reason, known=True)

    def abandoned(self) -> None:
        """The outcome is unknown: the call was cancelled."""
        self._report(None, known=False)

    def _report(self, failure: str | None, *, known: bool) -> State | None:
        if self._reported:
            return None
        self._reported = True
        return self._breaker.record(self, failure, known=known)


class BreakerRegistry:
    """The breakers of many servers; over ``max_breakers`` the least recently used one is dropped.

    >>> registry = BreakerRegistry(max_breakers=1)
    >>> registry.get("http://a", "rest") is registry.get("http://a", "rest")
    True
    """

    def __init__(
        self,
        *,
        max_breakers: int = MAX_BREAKERS,
        failure_threshold: int = FAILURE_THRESHOLD,
        reset_timeout_s: float = RESET_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_breakers = max_breakers
        self._failure_threshold = failure_threshold
        self._reset_timeout_s = reset_timeout_s
        self._clock = clock
        self._lock = threading.Lock()
        self._breakers: OrderedDict[tuple[int, str, Purpose], Breaker] = OrderedDict()

    def get(self, server: str, purpose: Purpose) -> Breaker:
        """The breaker of one purpose of a server."""
        key = (os.getpid(), server, purpose)  # a forked child has breakers of its own
        with self._lock:
            breaker = self._breakers.get(key)
            if breaker is None:
                breaker = Breaker(
                    failure_threshold=self._failure_threshold,
                    reset_timeout_s=self._reset_timeout_s,
                    clock=self._clock,
                )
                self._breakers[key] = breaker
                if len(self._breakers) > self._max_breakers:
                    self._breakers.popitem(last=False)
            else:
                self._breakers.move_to_end(key)
            return breaker

    def reset_after_fork(self) -> None:
        """For a forked child: a thread of the parent may have held the locks, and does not exist here."""
        self._lock = threading.Lock()
        self._breakers = OrderedDict()

    def states(self) -> dict[tuple[str, Purpose], State]:
        """The state of every breaker of this process, by server and purpose."""
        with self._lock:
            known = [(key, breaker) for key, breaker in self._breakers.items() if key[0] == os.getpid()]
        return {(server, purpose): breaker.state for (_, server, purpose), breaker in known}


breakers = BreakerRegistry()
"""The breakers of this process; all its clients share them."""

if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=breakers.reset_after_fork)
