"""The circuit breaker: after several failures in a row, calls fail without a request until a probe succeeds.

``CircuitBreaker`` counts the failures of one thing. ``BreakerRegistry`` holds those of the client's calls: one per base URL,
API key and endpoint, and one per server for its connections, which all keys and endpoints share. They are below the
retry policy: while one is open an attempt fails immediately, and the policy decides as after any other failure.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, ParamSpec, Protocol, TypeAlias, TypeVar

from tinkex._transport.shared import normalized_url
from tinkex.errors import APIStatusError, CircuitOpenError

if TYPE_CHECKING:
    from tinkex._wire.endpoints import Endpoint
    from tinkex.config import Config

__all__ = [
    "BreakerRegistry",
    "BreakerSettings",
    "BreakerStatus",
    "CircuitBreaker",
    "State",
    "Watcher",
    "circuit_breakers",
    "is_failure",
]

P = ParamSpec("P")
T = TypeVar("T")

State: TypeAlias = Literal["closed", "open", "half_open"]

PROBE_RETRY_S = 0.5
"""When calls that are rejected during a probe are worth another attempt; how long the probe takes is unknown."""
MAX_FAILING = 1024
"""Breakers with failures that are kept while no client uses them."""
CONNECTION: Final = "connection"
"""The name of the breaker that all keys and endpoints of a server share."""
ORDINARY: Final = 0
"""The permit of a call through a closed breaker; those of probes are positive."""


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    """When a breaker opens, for how long, and how many calls probe it then."""

    failure_threshold: int = 5
    """So many failures in a row, with no success between them, open a breaker."""
    cooldown_s: float = 5.0
    """How long a breaker stays open before it lets a probe through."""
    max_probes: int = 1
    """How many calls a half-open breaker lets through at a time."""

    def __post_init__(self) -> None:
        if self.failure_threshold < 1 or self.max_probes < 1 or not self.cooldown_s > 0:
            raise ValueError("failure_threshold and max_probes are at least 1, cooldown_s is positive")


DEFAULTS: Final = BreakerSettings()


def is_failure(status: int) -> bool:
    """Whether a status means that the server is failing; 4xx, 501 and 507 do not.

    >>> [status for status in (200, 400, 404, 408, 429, 500, 501, 503, 507) if is_failure(status)]
    [500, 503]
    """
    return status >= 500 and status not in {501, 507}


def counts(error: BaseException) -> bool:
    """Whether an exception of a guarded function is a failure: not if a server replied with a status that is none."""
    return isinstance(error, Exception) and not (
        isinstance(error, APIStatusError) and not is_failure(error.status_code)
    )


class Watcher(Protocol):
    """A client that has reported that a breaker opened, or that probes it."""

    def closed(self, breaker: CircuitBreaker, endpoint: Endpoint, reason: str) -> None:
        """The breaker has closed, by a call of whatever client, or by :meth:`CircuitBreaker.reset`."""
        ...


class CircuitBreaker:
    """Stops calls to something that keeps failing; thread-safe.

    ``state()`` is ``closed`` (calls go through), ``open`` (they raise ``CircuitOpenError``) or ``half_open``: the
    cool-down is over, and the next calls probe whether it works again. ``name`` is what errors call it;
    ``failure_threshold`` failures in a row open it for ``cooldown_s`` seconds, then ``max_probes`` calls at a time probe it.
    ``on_change`` is called with the new state and the reason, by the thread whose call changed it; ``clock`` returns seconds.

    >>> breaker = CircuitBreaker("search", failure_threshold=2, cooldown_s=30)
    >>> breaker.call(str.upper, "works")
    'WORKS'
    >>> for _ in range(2):
    ...     try:
    ...         breaker.call(int, "fails")
    ...     except ValueError:
    ...         pass
    >>> breaker.state()
    'open'
    """

    def __init__(
        self,
        name: str,
        *,
        failure_threshold: int = DEFAULTS.failure_threshold,
        cooldown_s: float = DEFAULTS.cooldown_s,
        max_probes: int = DEFAULTS.max_probes,
        on_change: Callable[[State, str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.settings = BreakerSettings(failure_threshold, cooldown_s, max_probes)
        self.reason = ""
        """The last failure that opened it."""
        self._on_change = on_change
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._opened_at: float | None = None
        self._probes: set[int] = set()
        self._num_probes = self._num_probes_before = 0
        self._watchers: weakref.WeakKeyDictionary[Watcher, Endpoint] = weakref.WeakKeyDictionary()

    def __repr__(self) -> str:
        return f"<CircuitBreaker {self.name!r} {self.state()}>"

    def state(self) -> State:
        """``closed``, ``open``, or ``half_open`` after the cool-down.

        >>> CircuitBreaker("search").state()
        'closed'
        """
        with self._lock:
            if self._opened_at is None:
                return "closed"
            return "half_open" if self._remaining_s() <= 0 else "open"

    def reset(self) -> None:
        """Closes it and forgets its failures.

        ::

            breaker.reset()  # the service is up again: do not wait for the cool-down
        """
        with self._lock:
            was_closed = self._opened_at is None
            self._close()
        if not was_closed:
            self._changed("closed", "it was reset")

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls ``function`` with ``args`` and ``kwargs``, or raises ``CircuitOpenError`` without doing so.

        An exception is a failure. Statuses below 500, 501 and 507 are none: the server works.

        >>> CircuitBreaker("search").call(int, "11", base=2)
        3
        """
        permit = self._enter()
        try:
            value = function(*args, **kwargs)
        except BaseException as error:
            self._leave(permit, error)
            raise
        self._leave(permit, None)
        return value

    async def call_async(self, function: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """As :meth:`call`, for an async ``function``; a cancelled call is neither a success nor a failure.

        ``args`` and ``kwargs`` are those of the function::

            hits = await breaker.call_async(search, "tides", limit=10)
        """
        permit = self._enter()
        try:
            value = await function(*args, **kwargs)
        except BaseException as error:
            self._leave(permit, error)
            raise
        self._leave(permit, None)
        return value

    @property
    def is_closed(self) -> bool:
        """Whether calls go through; cheaper than :meth:`state`."""
        return self._opened_at is None

    @property
    def retry_after_s(self) -> float:
        """Seconds until another attempt is worthwhile: the breaker lets a call through, or the probe may have ended."""
        with self._lock:
            return max(self._remaining_s(), PROBE_RETRY_S if self._full else 0.0)

    def acquire(self) -> int | None:
        """Returns a permit for one call, or None while the breaker is open; :meth:`record` how the call ended.

        >>> CircuitBreaker("search").acquire()
        0
        """
        with self._lock:
            if self._opened_at is None:
                return ORDINARY
            if self._remaining_s() > 0 or self._full:
                return None
            self._num_probes += 1
            self._probes.add(permit := self._num_probes)
        if self.is_first_probe(permit):
            self._changed("half_open", "the cool-down is over")
        return permit

    def watch(self, watcher: Watcher, endpoint: Endpoint) -> None:
        """Notifies ``watcher``, a client that called ``endpoint``, when the breaker closes next.

        ::

            breaker.watch(client, endpoint)
        """
        with self._lock:
            self._watchers[watcher] = endpoint

    def is_first_probe(self, permit: int) -> bool:
        """Whether the call of ``permit``, from :meth:`acquire`, is the first since the breaker opened.

        ::

            probing = breaker.is_first_probe(permit)
        """
        return permit == self._num_probes_before + 1

    def record(self, permit: int, failure: str | None) -> State | None:
        """Records that the call of ``permit`` succeeded, or its ``failure``; returns the new state if it changed.

        >>> breaker = CircuitBreaker("search", failure_threshold=1)
        >>> breaker.record(breaker.acquire(), "timed out")
        'open'
        """
        if failure is None and not self._failures and self._opened_at is None:
            return None  # the usual case takes no lock
        with self._lock:
            state = self._record(permit, failure)
        if state is not None:
            self._changed(state, failure or "it works again")
        return state

    def abandon(self, permit: int) -> None:
        """Returns the ``permit`` of a call whose outcome is unknown: it was cancelled.

        ::

            breaker.abandon(permit)
        """
        if permit != ORDINARY:
            with self._lock:
                self._probes.discard(permit)

    def _record(self, permit: int, failure: str | None) -> State | None:
        if self._opened_at is not None:
            if permit not in self._probes:
                return None  # it began before the breaker opened: only probes count
            if failure is None:
                self._close()
                return "closed"
        elif failure is None:
            self._failures = 0
            return None
        else:
            self._failures += 1
            if self._failures < self.settings.failure_threshold:
                return None
        self._opened_at, self.reason = self._clock(), failure
        self._num_probes_before = self._num_probes
        self._probes.clear()
        return "open"

    def _close(self) -> None:
        self._opened_at, self._failures = None, 0
        self._probes.clear()

    @property
    def _full(self) -> bool:
        return len(self._probes) >= self.settings.max_probes

    def _remaining_s(self) -> float:
        return 0.0 if self._opened_at is None else self._opened_at + self.settings.cooldown_s - self._clock()

    def _changed(self, state: State, reason: str) -> None:
        if self._on_change is not None:
            self._on_change(state, reason)
        if state == "closed":
            with self._lock:
                watchers = list(self._watchers.items())
                self._watchers.clear()
            for watcher, endpoint in watchers:
                watcher.closed(self, endpoint, reason)

    def _enter(self) -> int:
        permit = self.acquire()
        if permit is None:
            retry_after_s = self.retry_after_s
            raise CircuitOpenError(
                None,
                f"{self.name} was not called: it keeps failing, last with: {self.reason}. "
                f"The next attempt is possible in {retry_after_s:.1f} s; reset() allows one now",
                retry_after_s,
            )
        return permit

    def _leave(self, permit: int, error: BaseException | None) -> None:
        if error is None or (isinstance(error, Exception) and not counts(error)):
            self.record(permit, None)
        elif counts(error):
            self.record(permit, f"{type(error).__name__}: {error}")
        else:
            self.abandon(permit)  # cancelled, or the program ends


@dataclass(frozen=True, slots=True)
class _Key:
    """What distinguishes breakers. Clients with other settings, or another way to the server, have breakers of their own."""

    server: str
    api_key: str | None
    """None for the breaker of the connections, and for clients without a key."""
    endpoint: str
    settings: BreakerSettings
    route: tuple[Any, ...]
    """The proxy and the certificates."""


@dataclass(frozen=True, slots=True)
class BreakerStatus:
    """One breaker of the client's calls."""

    base_url: str
    endpoint: str
    """The name of the endpoint, or ``connection``."""
    state: State
    reason: str
    """The last failure, if it is not closed."""


class BreakerRegistry:
    """The breakers of the client's calls, for all clients of this process.

    >>> registry = BreakerRegistry()
    >>> registry.state("http://host:8787", "asample")
    'closed'
    """

    def __init__(
        self, *, max_failing: int = MAX_FAILING, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_failing = max_failing
        self._clock = clock
        self.reset_after_fork()

    def reset_after_fork(self) -> None:
        """For a forked child: a thread of the parent may have held the locks, and does not exist here.

        ::

            os.register_at_fork(after_in_child=lambda: registry.reset_after_fork())
        """
        self.pid = os.getpid()
        """The process of the breakers; a client that a fork has copied asks for new ones."""
        self._lock = threading.Lock()
        # Clients refer to the breakers they use. One without failures and without a client is as good as a new one.
        self._known: weakref.WeakValueDictionary[_Key, CircuitBreaker] = weakref.WeakValueDictionary()
        self._keys: weakref.WeakKeyDictionary[CircuitBreaker, _Key] = weakref.WeakKeyDictionary()
        self._failing: OrderedDict[_Key, CircuitBreaker] = OrderedDict()

    def get(self, config: Config, endpoint: str) -> CircuitBreaker:
        """The breaker of ``endpoint`` for the server and key of ``config``; of all its connections for ``"connection"``.

        ::

            breaker = circuit_breakers.get(service.config, "asample")
        """
        key = _Key(
            normalized_url(config.base_url),
            None if endpoint == CONNECTION else config.api_key or config.credential_cmd,
            endpoint,
            BreakerSettings(
                config.circuit_breaker_failures,
                config.circuit_breaker_cooldown,
                config.circuit_breaker_probes,
            ),
            (config.proxy, tuple(sorted(config.proxy_headers.items())), config.ca_file),
        )
        with self._lock:
            breaker = self._known.get(key)
            if breaker is None:
                settings = key.settings
                breaker = CircuitBreaker(
                    endpoint,
                    failure_threshold=settings.failure_threshold,
                    cooldown_s=settings.cooldown_s,
                    max_probes=settings.max_probes,
                    clock=self._clock,
                )
                self._known[key] = breaker
                self._keys[breaker] = key
            return breaker

    def keep(self, breaker: CircuitBreaker) -> None:
        """Keeps ``breaker``, which has counted a failure, also when no client refers to it any more.

        ::

            circuit_breakers.keep(breaker)
        """
        with self._lock:
            key = self._keys.get(breaker)
            if key is None:
                return  # it is of the process that this one was forked from
            self._failing[key] = breaker
            self._failing.move_to_end(key)
            if len(self._failing) > self._max_failing:
                self._failing.popitem(last=False)

    def state(self, base_url: str, endpoint: str = CONNECTION, api_key: str | None = None) -> State:
        """The state of the breaker of ``endpoint``, by default of the connections, at the server ``base_url``.

        Without ``api_key`` it is the worst one of all keys.

        >>> circuit_breakers.state("http://host:8787")
        'closed'
        """
        found = {breaker.state() for _, breaker in self._select(base_url, endpoint, api_key)}
        for state in _WORST_FIRST:
            if state in found:
                return state
        return "closed"

    def states(self, base_url: str | None = None) -> list[BreakerStatus]:
        """Every breaker that is in use, or that has failures; of the server ``base_url``, or of all.

        >>> BreakerRegistry().states()
        []
        """
        return [
            BreakerStatus(key.server, key.endpoint, state, breaker.reason if state != "closed" else "")
            for key, breaker in self._select(base_url, None, None)
            for state in (breaker.state(),)
        ]

    def reset(
        self, base_url: str | None = None, endpoint: str | None = None, api_key: str | None = None
    ) -> int:
        """Closes the breakers of ``base_url``, ``endpoint`` and ``api_key``, by default all; returns how many were not closed.

        >>> BreakerRegistry().reset("http://host:8787")
        0
        """
        selected = [breaker for _, breaker in self._select(base_url, endpoint, api_key)]
        not_closed = sum(not breaker.is_closed for breaker in selected)
        for breaker in selected:
            breaker.reset()
        return not_closed

    def _select(
        self, base_url: str | None, endpoint: str | None, api_key: str | None
    ) -> list[tuple[_Key, CircuitBreaker]]:
        server = None if base_url is None else normalized_url(base_url)
        with self._lock:
            known = list(self._known.items())
        return [
            (key, breaker)
            for key, breaker in known
            if server in {None, key.server}
            and endpoint in {None, key.endpoint}
            and (api_key is None or key.endpoint == CONNECTION or key.api_key == api_key)
        ]


_WORST_FIRST: tuple[State, ...] = ("open", "half_open", "closed")

circuit_breakers = BreakerRegistry()
"""The breakers of this process, which all its clients share: ``tinkex.circuit_breakers``."""

if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=circuit_breakers.reset_after_fork)
