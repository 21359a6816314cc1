"""The circuit breakers of one server: which of them a call passes, and the events they emit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinkex._transport.breaker import breakers, is_failure
from tinkex._transport.shared import SharedHttp, normalized_url
from tinkex.errors import CircuitOpenError
from tinkex.observability.events import CircuitChanged

if TYPE_CHECKING:
    from tinkex._transport.base import Transport
    from tinkex._transport.breaker import BreakerRegistry, Permit, State
    from tinkex._wire.endpoints import Endpoint
    from tinkex.config import Config
    from tinkex.errors import HttpRequest
    from tinkex.observability.events import Sink

__all__ = ["Circuit", "GuardedCall", "circuit_of"]


class Circuit:
    """Guards the calls to one server."""

    def __init__(self, base_url: str, registry: BreakerRegistry, sink: Sink) -> None:
        self._base_url = base_url
        self._server = normalized_url(base_url)
        self._registry = registry
        self._sink = sink

    def enter(self, endpoint: Endpoint, about: HttpRequest) -> GuardedCall:
        """Lets a call through, or raises :class:`CircuitOpenError`."""
        breaker = self._registry.get(self._server, endpoint.purpose)
        permit = breaker.acquire()
        if permit is None:
            retry_after_s = breaker.retry_after_s
            raise CircuitOpenError(
                about,
                f"{endpoint.name} was not sent: calls of this kind ({endpoint.purpose}) to {self._base_url} keep "
                f"failing, last with: {breaker.reason}. The next attempt is possible in {retry_after_s:.1f} s; "
                "circuit_breaker=False (TINKEX_CIRCUIT_BREAKER=0) always sends",
                retry_after_s,
            )
        return GuardedCall(self, endpoint, permit)

    def state_changed(self, endpoint: Endpoint, state: State | None, reason: str) -> None:
        """Emits the new state of a breaker; None: nothing changed."""
        if state is not None:
            self._sink.emit(CircuitChanged(self._base_url, endpoint.purpose, state, reason))


class GuardedCall:
    """One call in flight, and its permit."""

    __slots__ = ("_circuit", "_endpoint", "_permit")

    def __init__(self, circuit: Circuit, endpoint: Endpoint, permit: Permit) -> None:
        self._circuit, self._endpoint, self._permit = circuit, endpoint, permit

    def replied(self, status: int) -> None:
        """The server replied."""
        if is_failure(status):
            self.failed(f"status {status}")
        else:
            self._circuit.state_changed(self._endpoint, self._permit.succeeded(), "the server replies again")

    def failed(self, reason: str) -> None:
        """The server did not reply."""
        self._circuit.state_changed(self._endpoint, self._permit.failed(reason), reason)

    def end(self) -> None:
        """Returns the permit; does nothing after one of the others."""
        self._permit.abandoned()


def circuit_of(transport: Transport, config: Config, sink: Sink) -> Circuit | None:
    """The circuit of a server over HTTP; None where it is switched off, and for transports without a network."""
    if not config.circuit_breaker or not isinstance(transport, SharedHttp):
        return None
    return Circuit(config.base_url, breakers, sink)
