"""Connections of the server: how many are open, and which one is closed to make room for another.

Every connection holds a file descriptor, and so does every file that the server reads or writes. The number of connections
is limited in total, so that descriptors are left for files, and per client address, so that one client cannot take all
of them. At a limit the connection that has been idle for longest is closed: at the total limit one of the address that
has most. A client that sends no requests therefore delays no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import socket
import ssl
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TypeAlias

from tinkex.errors import SetupError

__all__ = ["AcceptedConnection", "Connections", "accept", "parse_proxies", "raise_descriptor_limit"]

logger = logging.getLogger("tinkex.server")

Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

MAX_CONNECTIONS = 16_384
MAX_DESCRIPTORS = 65_536
RESERVED_DESCRIPTORS = 512
"""Descriptors for the database, checkpoints, models and the worker; at most half of all."""
ACCEPT_RETRY_S = 0.1
LOG_INTERVAL_S = 60.0

_TOO_MANY = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nConnection: close\r\nRetry-After: 1\r\n"
    b'Content-Length: 80\r\n\r\n{"detail":"the server has too many open connections; close some, or try later."}'
)


def raise_descriptor_limit() -> int:
    """Raises the soft limit of open files to the hard limit, at most to 65536; returns the limit in force."""
    if sys.platform == "win32":  # no such limit
        return MAX_DESCRIPTORS
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    wanted = MAX_DESCRIPTORS if hard == unlimited else min(hard, MAX_DESCRIPTORS)
    if soft == unlimited or soft >= wanted:
        return MAX_DESCRIPTORS if soft == unlimited else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError) as error:  # macOS reports a hard limit that it does not accept
        logger.warning("the limit of open files stays at %d: %s", soft, error)
        return soft
    return wanted


def parse_proxies(text: str | None) -> tuple[Network, ...]:
    """Returns the addresses and networks of trusted proxies; raises :class:`SetupError` for anything else.

    >>> parse_proxies("127.0.0.1, 10.0.0.0/8")
    (IPv4Network('127.0.0.1/32'), IPv4Network('10.0.0.0/8'))
    """
    try:
        return tuple(ipaddress.ip_network(part.strip()) for part in text.split(",")) if text else ()
    except ValueError as error:
        raise SetupError(
            f"behind_proxy is {text!r}: {error}; give the addresses or networks of your proxies, such as 10.0.0.5 or "
            "10.0.0.0/24, separated by commas."
        ) from None


class AcceptedConnection:
    """One open connection of a client address. It is idle at first; ``close`` ends it immediately."""

    __slots__ = ("_client", "_on_ended", "close")

    def __init__(self, client: _Client, on_ended: Callable[[_Client], None]) -> None:
        self._client = client
        self._on_ended: Callable[[_Client], None] | None = on_ended
        self.close: Callable[[], object] = lambda: None
        self.idle()

    def busy(self) -> None:
        """A request is being handled: the connection is not closed to make room."""
        self._client.idle.pop(self, None)

    def idle(self) -> None:
        """The connection waits for the client, which sends no request or does not read the response."""
        self._client.idle.pop(self, None)
        if self._on_ended is not None:
            self._client.idle[self] = None

    def ended(self) -> None:
        """The connection is closed and no longer counted."""
        self._client.idle.pop(self, None)
        on_ended, self._on_ended = self._on_ended, None
        if on_ended is not None:
            on_ended(self._client)


@dataclass(eq=False)
class _Client:
    """The connections of one address, idle ones in the order in which they became idle."""

    address: str
    num_open: int = 0
    idle: dict[AcceptedConnection, None] = field(default_factory=dict)


class Connections:
    """Counts connections per address and in total, and decides which one is closed for another.

    >>> connections = Connections(max_total=100, max_per_address=1)
    >>> first = connections.open("192.0.2.1")
    >>> first.busy()
    >>> connections.open("192.0.2.1") is None
    True
    """

    def __init__(self, max_total: int, max_per_address: int, proxies: Collection[Network] = ()) -> None:
        self.max_total, self.max_per_address = max_total, max_per_address
        self._proxies = proxies
        self._clients: dict[str, _Client] = {}
        self._num_open = 0
        self._logged_at = -LOG_INTERVAL_S

    @classmethod
    def within_limits(
        cls,
        descriptors: int,
        max_total: int | None = None,
        max_per_address: int | None = None,
        proxies: Collection[Network] = (),
    ) -> Connections:
        """Returns the connections for a number of descriptors; raises :class:`SetupError` if more are wanted."""
        possible = descriptors - min(RESERVED_DESCRIPTORS, descriptors // 2)
        total = min(possible, MAX_CONNECTIONS) if max_total is None else max_total
        if total > possible:
            raise SetupError(
                f"max_connections is {total}, but this process may open {descriptors} files and needs {descriptors - possible} of "
                f"them for its data; choose at most {possible}, or raise the limit (ulimit -n)."
            )
        per_address = max(1, total // 2) if max_per_address is None else max_per_address
        for name, value in (("max_connections", total), ("max_connections_per_address", per_address)):
            if value < 1:
                raise SetupError(f"{name} is {value}; it must be at least 1.")
        return cls(total, per_address, proxies)

    def open(self, host: str) -> AcceptedConnection | None:
        """Counts a new connection and closes an idle one if there are too many; None if none is idle."""
        address, is_proxy = self._classify(host)
        client = self._clients.get(address) or _Client(address)
        if client.num_open >= self.max_per_address and not is_proxy:
            self._log(f"a client has {client.num_open} connections, the maximum per address")
            if not self._close_idle([client]):
                return None
        elif self._num_open >= self.max_total:
            self._log(f"{self._num_open} connections are open, the maximum")
            if not self._close_idle(self._clients.values()):
                return None
        self._clients[address] = client
        client.num_open += 1
        self._num_open += 1
        return AcceptedConnection(client, self._ended)

    def close_one(self, reason: str) -> None:
        """Closes an idle connection, if there is one, and logs why."""
        self._log(reason)
        self._close_idle(self._clients.values())

    def _close_idle(self, clients: Collection[_Client]) -> bool:
        client = max((each for each in clients if each.idle), key=lambda each: each.num_open, default=None)
        if client is None:
            return False
        connection = next(iter(client.idle))
        connection.busy()  # it is not chosen again until it has ended
        connection.close()
        return True

    def _ended(self, client: _Client) -> None:
        client.num_open -= 1
        self._num_open -= 1
        if not client.num_open:
            self._clients.pop(client.address, None)

    def _classify(self, host: str) -> tuple[str, bool]:
        """Returns what a host is counted as, and whether it is a trusted proxy."""
        try:
            address = ipaddress.ip_address(host.partition("%")[0])
        except ValueError:
            return host, False
        is_proxy = any(address in network for network in self._proxies)
        if address.version == 6 and not address.is_loopback and not is_proxy:
            # A host usually has a /64 network for itself.
            return str(ipaddress.ip_network((address, 64), strict=False)), False
        return str(address), is_proxy

    def _log(self, reason: str) -> None:
        now = time.monotonic()
        if now - self._logged_at >= LOG_INTERVAL_S:
            self._logged_at = now
            logger.warning("%s: idle ones are closed, or new ones rejected", reason)


async def accept(
    listener: socket.socket,
    connections: Connections,
    make_protocol: Callable[[AcceptedConnection], asyncio.Protocol],
    tls: ssl.SSLContext | None,
    handshake_s: float,
) -> None:
    """Accepts connections until it is cancelled; their protocols report when they are busy, idle and have ended."""
    loop = asyncio.get_running_loop()
    listener.settimeout(0.0)
    while True:
        try:
            client, address = await loop.sock_accept(listener)
        except OSError as error:
            if error.errno != errno.ECONNABORTED:  # the client has gone
                connections.close_one(f"a connection cannot be accepted ({error.strerror})")
                await asyncio.sleep(ACCEPT_RETRY_S)
            continue
        connection = connections.open(address[0])
        if connection is None:
            _reject(client, tls)
        else:
            _start(client, connection, make_protocol(connection), tls, handshake_s)
        await asyncio.sleep(0)  # what is to be closed is closed before the next one is accepted


def _start(
    client: socket.socket,
    connection: AcceptedConnection,
    protocol: asyncio.Protocol,
    tls: ssl.SSLContext | None,
    handshake_s: float,
) -> None:

    async def connect() -> None:
        loop = asyncio.get_running_loop()
        timeout_s = None if tls is None else handshake_s
        transport, _ = await loop.connect_accepted_socket(
            lambda: protocol, client, ssl=tls, ssl_handshake_timeout=timeout_s
        )
        connection.close = transport.abort

    def done(connecting: asyncio.Task[None]) -> None:
        if (
            connecting.cancelled() or connecting.exception() is not None
        ):  # no handshake, or closed to make room
            client.close()
            connection.ended()

    connecting = asyncio.get_running_loop().create_task(connect())
    connection.close = connecting.cancel
    connecting.add_done_callback(done)


def _reject(client: socket.socket, tls: ssl.SSLContext | None) -> None:
    with client:
        client.settimeout(0.0)
        if tls is None:
            with contextlib.suppress(OSError):
                client.send(_TOO_MANY)
