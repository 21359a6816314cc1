"""A client's way through the circuit breakers: which one a call passes, and who hears of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinkex._transport.breaker import breakers, is_failure
from tinkex._transport.shared import SharedHttp, server_of
from tinkex.errors import CircuitOpenError
from tinkex.observability.events import CircuitChanged

if TYPE_CHECKING:
    from tinkex._transport.base import Transport
    from tinkex._transport.breaker import Breakers, Passing, State
    from tinkex._wire.endpoints import Endpoint
    from tinkex.config import Config
    from tinkex.errors import HttpRequest
    from tinkex.observability.events import Sink

__all__ = ["Circuit", "circuit_of"]


class Circuit:
    """The breakers of one server."""

    def __init__(self, base_url: str, known: Breakers, sink: Sink) -> None:
        self._base_url = base_url
        self._server = server_of(base_url)
        self._known = known
        self._sink = sink

    def enter(self, row: Endpoint, about: HttpRequest) -> Passage:
        """Lets a call through, or raises :class:`CircuitOpenError`."""
        breaker = self._known.of(self._server, row.purpose)
        passing = breaker.enter()
        if passing is None:
            left_s = breaker.left_s
            raise CircuitOpenError(
                about,
                f"{row.name} was not sent: {self._base_url} keeps failing at calls of this kind "
                f"({row.purpose}), last with: {breaker.reason}. It is tried again in {left_s:.1f} s; "
                "circuit_breaker=False (TINKEX_CIRCUIT_BREAKER=0) always sends",
                left_s,
            )
        return Passage(self, row, passing)

    def changed(self, row: Endpoint, state: State | None, reason: str) -> None:
        """Tells that a breaker changed its state, if it did."""
        if state is not None:
            self._sink.emit(CircuitChanged(self._base_url, row.purpose, state, reason))


class Passage:
    """One call on its way."""

    __slots__ = ("_circuit", "_passing", "_row")

    def __init__(self, circuit: Circuit, row: Endpoint, passing: Passing) -> None:
        self._circuit, self._row, self._passing = circuit, row, passing

    def answered(self, status: int) -> None:
        """The server answered."""
        if is_failure(status):
            self.unanswered(f"status {status}")
        else:
            self._circuit.changed(self._row, self._passing.succeeded(), "it answers again")

    def unanswered(self, reason: str) -> None:
        """It did not."""
        self._circuit.changed(self._row, self._passing.failed(reason), reason)

    def over(self) -> None:
        """Nobody waits any more; does nothing if the end is known."""
        self._passing.abandoned()


def circuit_of(transport: Transport, config: Config, sink: Sink) -> Circuit | None:
    """The circuit to a server over HTTP; None where it is switched off, or where there is no network on the way."""
    if not config.circuit_breaker or not isinstance(transport, SharedHttp):
        return None
    return Circuit(config.base_url, breakers, sink)
