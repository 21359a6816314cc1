"""Which connections a server accepts, and which ones it closes for others."""

from __future__ import annotations

import pytest

from tinkex.cli.server_connections import AcceptedConnection, Connections, parse_proxies
from tinkex.errors import SetupError


class Clients:
    """Opens connections and records which ones are closed."""

    def __init__(self, connections: Connections) -> None:
        self.connections = connections
        self.closed: list[str] = []

    def open(self, host: str, name: str = "") -> AcceptedConnection | None:
        connection = self.connections.open(host)
        if connection is not None:

            def close() -> None:
                self.closed.append(name)
                connection.ended()

            connection.close = close
        return connection

    def request(self, host: str) -> AcceptedConnection | None:
        """A connection with a request in flight."""
        connection = self.open(host, f"request of {host}")
        if connection is not None:
            connection.busy()
        return connection


def test_an_address_at_its_limit_loses_its_own_connection_that_was_idle_for_longest() -> None:
    clients = Clients(Connections(max_total=100, max_per_address=2))
    clients.open("192.0.2.9", "somebody else's")
    first, second = (clients.open("192.0.2.1", name) for name in ("first", "second"))
    assert first is not None
    assert second is not None
    first.busy()
    first.idle()  # after the second
    assert clients.open("192.0.2.1", "third") is not None
    assert clients.closed == ["second"]
    assert clients.open("192.0.2.1", "fourth") is not None
    assert clients.closed == ["second", "first"]


def test_a_connection_with_a_request_in_flight_is_never_closed_for_another() -> None:
    clients = Clients(Connections(max_total=3, max_per_address=2))
    served = [clients.request("192.0.2.1") for _ in range(2)]
    assert clients.open("192.0.2.1") is None
    assert clients.request("192.0.2.2") is not None
    assert clients.open("192.0.2.3") is None
    assert clients.closed == []
    assert served[0] is not None
    served[0].ended()
    assert clients.open("192.0.2.1") is not None


def test_at_the_total_limit_the_address_with_most_connections_gives_one_up() -> None:
    clients = Clients(Connections(max_total=5, max_per_address=4))
    clients.open("192.0.2.1", "polite")
    for number in range(4):
        clients.open("192.0.2.66", f"idle {number}")
    assert clients.open("192.0.2.2", "new") is not None
    assert clients.closed == ["idle 0"]


def test_addresses_of_one_ipv6_network_count_as_one_client() -> None:
    clients = Clients(Connections(max_total=100, max_per_address=1))
    assert clients.request("2001:db8::1") is not None
    assert clients.request("2001:db8::2") is None
    assert clients.request("2001:db8:0:1::1") is not None
    assert clients.request("fe80::1%eth0") is not None


def test_a_trusted_proxy_has_no_limit_per_address() -> None:
    clients = Clients(Connections(10, 1, parse_proxies("10.0.0.5, 10.1.0.0/16")))
    assert all(clients.request("10.0.0.5") and clients.request("10.1.2.3") for _ in range(5))
    assert clients.request("10.0.0.6") is None


def test_a_connection_that_ended_twice_is_counted_once() -> None:
    clients = Clients(Connections(max_total=2, max_per_address=2))
    first = clients.request("192.0.2.1")
    assert clients.request("192.0.2.1") is not None
    assert first is not None
    for _ in range(3):
        first.ended()
        first.idle()  # too late: it must not be chosen to make room
    assert clients.request("192.0.2.1") is not None
    assert clients.request("192.0.2.1") is None


@pytest.mark.parametrize(("descriptors", "total"), [(200, 100), (1024, 512), (65_536, 16_384)])
def test_descriptors_are_left_for_files(descriptors: int, total: int) -> None:
    connections = Connections.within_limits(descriptors)
    assert (connections.max_total, connections.max_per_address) == (total, total // 2)


def test_limits_that_cannot_hold_are_rejected() -> None:
    with pytest.raises(SetupError, match="ulimit -n"):
        Connections.within_limits(1024, max_total=1000)
    with pytest.raises(SetupError, match="max_connections_per_address"):
        Connections.within_limits(1024, max_per_address=0)
    for text in ("*", "proxy.example", "10.0.0.5/24", "10.0.0.5,"):
        with pytest.raises(SetupError, match="behind_proxy"):
            parse_proxies(text)
