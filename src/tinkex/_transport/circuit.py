"""The circuit breakers of one client: which of them a call passes, and the events they emit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tinkex._transport.breaker import CONNECTION, ORDINARY, circuit_breakers, is_failure
from tinkex._transport.connection import ConnectionLost
from tinkex._transport.shared import SharedHttp
from tinkex.errors import APITimeoutError, CircuitOpenError
from tinkex.observability.events import CircuitChanged

if TYPE_CHECKING:
    from tinkex._transport.base import Transport
    from tinkex._transport.breaker import BreakerRegistry, CircuitBreaker, State
    from tinkex._wire.endpoints import Endpoint
    from tinkex.config import Config
    from tinkex.errors import APIConnectionError, HttpRequest
    from tinkex.observability.events import Sink

__all__ = ["Circuit", "GuardedCall", "circuit_of"]

GENERATED = frozenset({"checkpoint_archive", "external_weights_urls", "export_session_trace"})
"""Endpoints whose 503 with a Retry-After says that a file is being made, not that the server is failing."""


class Circuit:
    """Guards the calls of one client: each passes the breaker of the server's connections and that of its endpoint."""

    def __init__(self, config: Config, registry: BreakerRegistry, sink: Sink) -> None:
        self._config = config
        self._registry = registry
        self._sink = sink
        self._find_breakers()

    def _find_breakers(self) -> None:
        self._pid = self._registry.pid
        self._connection = self._registry.get(self._config, CONNECTION)
        self._breakers: dict[str, CircuitBreaker] = {}

    def enter(self, endpoint: Endpoint, about: HttpRequest) -> GuardedCall:
        """Lets a call through, or raises :class:`CircuitOpenError`."""
        if self._pid != self._registry.pid:  # a fork has copied this client
            self._find_breakers()
        breaker = self._breakers.get(endpoint.name)
        if breaker is None:
            breaker = self._breakers[endpoint.name] = self._registry.get(self._config, endpoint.name)
        connection = self._connection
        if connection.is_closed and breaker.is_closed:
            return GuardedCall(self, endpoint, breaker, ORDINARY, ORDINARY)
        connection_permit = self._acquire(connection, endpoint, about)
        try:
            permit = self._acquire(breaker, endpoint, about)
        except CircuitOpenError:
            connection.abandon(connection_permit)
            raise
        return GuardedCall(self, endpoint, breaker, connection_permit, permit)

    @property
    def connection(self) -> CircuitBreaker:
        """The breaker that all keys and endpoints of the server share."""
        return self._connection

    def _acquire(self, breaker: CircuitBreaker, endpoint: Endpoint, about: HttpRequest) -> int:
        permit = breaker.acquire()
        if permit is None:
            retry_after_s = breaker.retry_after_s
            failing = "connections to it keep" if breaker is self._connection else f"{endpoint.name} keeps"
            raise CircuitOpenError(
                about,
                f"{endpoint.name} was not sent to {self._config.base_url}: {failing} failing, last with: "
                f"{breaker.reason}. The next attempt is possible in {retry_after_s:.1f} s; "
                "circuit_breaker=False (TINKEX_CIRCUIT_BREAKER=0) always sends",
                retry_after_s,
            )
        if permit != ORDINARY:
            breaker.watch(self, endpoint)
            if breaker.is_first_probe(permit):
                self._emit(breaker, endpoint, "half_open", "the cool-down is over; the next call is a probe")
        return permit

    def record(self, breaker: CircuitBreaker, endpoint: Endpoint, permit: int, failure: str | None) -> None:
        """Records the outcome of a call; emits that the breaker opened, if it did."""
        state = breaker.record(permit, failure)
        if failure is None:
            return
        self._registry.keep(breaker)
        if state == "open":
            breaker.watch(self, endpoint)
            self._emit(breaker, endpoint, state, failure)

    def closed(self, breaker: CircuitBreaker, endpoint: Endpoint, reason: str) -> None:
        """Emits that a breaker has closed, also by a call of another client: the clients of a key share its breakers."""
        self._emit(breaker, endpoint, "closed", reason)

    def _emit(self, breaker: CircuitBreaker, endpoint: Endpoint, state: State, reason: str) -> None:
        shared = breaker is self._connection
        purpose, name = (CONNECTION, CONNECTION) if shared else (endpoint.purpose, endpoint.name)
        self._sink.emit(CircuitChanged(self._config.base_url, purpose, state, reason, name))


class GuardedCall:
    """One call in flight, and its permits; only the first report counts."""

    __slots__ = ("_breaker", "_circuit", "_connection_permit", "_ended", "_endpoint", "_permit")

    def __init__(
        self,
        circuit: Circuit,
        endpoint: Endpoint,
        breaker: CircuitBreaker,
        connection_permit: int,
        permit: int,
    ) -> None:
        self._circuit, self._endpoint, self._breaker = circuit, endpoint, breaker
        self._connection_permit, self._permit = connection_permit, permit
        self._ended = False

    def replied(self, status: int, headers: Mapping[str, str]) -> None:
        """The server replied, so the connection works; the endpoint does too unless the status says otherwise."""
        self._ended = True
        circuit, endpoint = self._circuit, self._endpoint
        circuit.record(circuit.connection, endpoint, self._connection_permit, None)
        asks_to_wait = "retry-after" in headers or "retry-after-ms" in headers
        generating = status == 503 and endpoint.name in GENERATED and asks_to_wait
        failing = is_failure(status) and not generating
        circuit.record(self._breaker, endpoint, self._permit, f"status {status}" if failing else None)

    def failed(self, error: APIConnectionError) -> None:
        """There was no reply: the server cannot be reached, or it does not answer this call."""
        self._ended = True
        circuit, endpoint = self._circuit, self._endpoint
        if not _cannot_connect(error):
            circuit.connection.abandon(self._connection_permit)
        else:
            circuit.record(circuit.connection, endpoint, self._connection_permit, error.message)
            if not circuit.connection.is_closed:
                self._breaker.abandon(self._permit)
                return
        circuit.record(self._breaker, endpoint, self._permit, error.message)

    def end(self) -> None:
        """Returns the permits; does nothing after one of the others."""
        if not self._ended:
            self._ended = True
            self._circuit.connection.abandon(self._connection_permit)
            self._breaker.abandon(self._permit)


def _cannot_connect(error: APIConnectionError) -> bool:
    """Whether no connection could be made, which is the same for every key and endpoint.

    A timeout or a connection that was lost before the reply may be due to the call itself.
    """
    cause = error.__cause__
    lost = (ConnectionLost, ConnectionResetError, ConnectionAbortedError, BrokenPipeError, TimeoutError)
    return (
        isinstance(cause, OSError) and not isinstance(error, APITimeoutError) and not isinstance(cause, lost)
    )


def circuit_of(transport: Transport, config: Config, sink: Sink) -> Circuit | None:
    """The circuit of a server over HTTP; None where it is switched off, and for transports without a network."""
    if not config.circuit_breaker or not isinstance(transport, SharedHttp):
        return None
    return Circuit(config, circuit_breakers, sink)
