"""Idle connections do not affect others: descriptors are left for files, and requests are answered."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

import tinkex
from tests.servers import ServedEngine, serve
from tests.unit.transport.tls import certificates

pytestmark = pytest.mark.slow

FEW_DESCRIPTORS = ("sh", "-c", 'ulimit -n 200; exec "$@"', "sh")
NUM_IDLE = 400


@contextlib.contextmanager
def idle_connections(server: ServedEngine, number: int = NUM_IDLE) -> Iterator[list[socket.socket]]:
    host, port = server.url.rpartition("/")[2].split(":")
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(socket.create_connection((host, int(port)), timeout=30))
            for _ in range(number)
        ]


def test_idle_connections_do_not_take_the_descriptors_of_saves(tiny_model: Path, tmp_path: Path) -> None:
    with (
        serve(tmp_path, "--model", f"tiny={tiny_model}", launcher=FEW_DESCRIPTORS) as server,
        tinkex.ServiceClient(base_url=server.url, api_key=server.key) as service,
    ):
        training = service.create_lora_training_client("tiny", rank=4)
        with idle_connections(server):
            for number in range(3):
                saved = training.save_state(f"step-{number}").result(timeout=120)
                assert saved.path.endswith(f"step-{number}")
        assert service.get_server_capabilities().supported_models
    assert "connections" in (tmp_path / "serve.log").read_text()


def test_connections_without_a_tls_handshake_are_closed_for_others(tiny_model: Path, tmp_path: Path) -> None:
    files = certificates(tmp_path)
    arguments = ("--model", f"tiny={tiny_model}", *files.options)
    trusted = ssl.create_default_context(cafile=str(files.authority))
    with serve(tmp_path, *arguments, launcher=FEW_DESCRIPTORS) as server, idle_connections(server) as idle:
        for _ in range(3):
            with urllib.request.urlopen(
                f"{server.url}/api/v1/healthz", timeout=60, context=trusted
            ) as response:
                assert json.loads(response.read())["status"] == "ok"
        closed = 0
        for each in idle:
            each.settimeout(0.0)
            with contextlib.suppress(BlockingIOError):
                closed += each.recv(1) == b""
        assert closed >= NUM_IDLE - 100


def test_a_client_at_its_limit_with_requests_in_flight_gets_503_and_retry_after(
    tiny_model: Path, tmp_path: Path
) -> None:
    arguments = ("--model", f"tiny={tiny_model}", "--max-connections-per-address", "2")
    with serve(tmp_path, *arguments) as server:
        head = (
            f"POST /api/v1/create_session HTTP/1.1\r\nHost: localhost\r\nX-API-Key: {server.key}\r\n"
            "Content-Length: 2\r\nExpect: 100-continue\r\n\r\n"
        )
        with idle_connections(server, 2) as busy:
            for each in busy:
                each.sendall(head.encode())
                assert b" 100 Continue" in each.recv(10_000)
            with idle_connections(server, 1) as (third,):
                refused = third.recv(10_000)
            assert b" 503 " in refused
            assert b"Retry-After" in refused
            assert b"too many open connections" in refused
            for each in busy:
                each.sendall(b"{}")
                assert b" 200 OK" in each.recv(10_000)


def test_the_soft_limit_of_open_files_is_raised(tiny_model: Path, tmp_path: Path) -> None:
    launcher = ("sh", "-c", 'ulimit -S -n 100; exec "$@"', "sh")
    with serve(tmp_path, "--model", f"tiny={tiny_model}", launcher=launcher) as server:
        limits = Path(f"/proc/{server.pid}/limits").read_text()
    (line,) = [line for line in limits.splitlines() if line.startswith("Max open files")]
    soft, hard = line.split()[3:5]
    assert int(soft) == min(int(hard), 65_536)
