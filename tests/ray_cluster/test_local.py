"""The cluster that ``--ray`` starts by itself: what it listens on, and what it tells others, without any settings."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.ray_nodes import ray_python
from tests.servers import ServedEngine, serve

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedEngine]:
    home = tmp_path_factory.mktemp("local")
    options = ("--model", f"tiny/llama={tiny_model}", "--ray", "--threads", "1")
    with serve(home, *options, python=ray_python(), env={"HOME": str(home)}) as served:
        yield served


def processes(server: ServedEngine) -> Iterator[psutil.Process]:
    """The server, Ray's processes, and the workers."""
    root = psutil.Process(server.pid)
    yield from (root, *root.children(recursive=True))


def test_it_listens_on_loopback_only(server: ServedEngine) -> None:
    listening = {
        (process.name(), connection.laddr.ip.removeprefix("::ffff:"))  # IPv4 on a socket of IPv6
        for process in processes(server)
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert {"raylet", "gcs_server"} <= {name for name, _ in listening}
    assert {each for each in listening if not ipaddress.ip_address(each[1]).is_loopback} == set()


def test_it_admits_only_those_with_its_token_and_reports_to_nobody(server: ServedEngine) -> None:
    (head,) = (each for each in processes(server) if each.name() == "gcs_server")
    environment = head.environ()
    assert environment["RAY_AUTH_MODE"] == "token"
    assert environment["RAY_USAGE_STATS_ENABLED"] == "0"
