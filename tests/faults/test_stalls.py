"""Stalled requests: the server times them out with 408 and serves other clients meanwhile."""

from __future__ import annotations

import io
import json
import select
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

import tinkex
from tests.servers import ServedEngine, serve

pytestmark = pytest.mark.slow

STALL_S = 3.0
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("impatient")


@pytest.fixture(scope="module")
def impatient(home: Path, tiny_model: Path) -> Iterator[ServedEngine]:
    """A server with a short stall timeout."""
    with serve(home, "--model", f"tiny/llama={tiny_model}", "--request-stall-s", str(STALL_S)) as engine:
        yield engine


def connected(server: ServedEngine) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def rest_of(wire: socket.socket) -> bytes:
    """Returns the data until the server closes."""
    return b"".join(iter(lambda: wire.recv(65_536), b""))


def head(server: ServedEngine, endpoint: str, length: int, key: str | None = None, kind: str = "") -> bytes:
    lines = [
        f"POST /api/v1/{endpoint} HTTP/1.1",
        "Host: x",
        f"X-API-Key: {key or server.key}",
        f"Content-Length: {length}",
        f"Content-Type: {kind or 'application/json'}",
    ]
    return "\r\n".join([*lines, "", ""]).encode()


def read_answer(answer: bytes) -> tuple[int, str]:
    status, _, body = answer.partition(b"\r\n\r\n")
    return int(status.split()[1]), json.loads(body)["detail"]


def an_incomplete_body_is_rejected_and_the_connection_closes(impatient: ServedEngine, home: Path) -> None:
    with connected(impatient) as wire:
        wire.sendall(head(impatient, "create_session", 1000) + b'{"tags"')
        status, detail = read_answer(rest_of(wire))
    assert status == 408
    assert "arrived for 3 s" in detail
    assert "send it again" in detail


def an_incomplete_upload_is_rejected_and_leaves_no_file(impatient: ServedEngine, home: Path) -> None:
    part = (
        b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.png"\r\n\r\n' + PNG + b"\0" * 5000
    )
    with connected(impatient) as wire:
        wire.sendall(head(impatient, "assets", 1_000_000, kind="multipart/form-data; boundary=x") + part)
        status, _ = read_answer(rest_of(wire))
    assert status == 408
    assert not [entry for entry in (home / "engine" / "assets").rglob("*") if entry.is_file()]
    rest = tinkex.RestClient(base_url=impatient.url, api_key=impatient.key)
    assert rest.list_assets().result(60).assets == []


def incomplete_headers_are_rejected_and_a_silent_connection_is_closed(
    impatient: ServedEngine, home: Path
) -> None:
    with connected(impatient) as half, connected(impatient) as silent:
        half.sendall(b"POST /api/v1/create_session HTTP/1.1\r\nHost: x\r\nX-A")
        status, detail = read_answer(rest_of(half))
        assert (status, detail) == (408, "the headers of this request did not arrive in time; send it again.")
        assert rest_of(silent) == b""


def slow_headers_do_not_extend_the_timeout(impatient: ServedEngine, home: Path) -> None:
    with connected(impatient) as wire:
        wire.sendall(b"POST /api/v1/create_session HTTP/1.1\r\nX-Slow: ")
        wire.settimeout(STALL_S / 5)
        answer = b""
        deadline = time.monotonic() + 60
        while not answer:
            assert time.monotonic() < deadline
            wire.sendall(b"a")
            try:
                answer = wire.recv(65_536)
            except TimeoutError:
                continue
    assert answer.startswith(b"HTTP/1.1 408")


def a_request_without_a_key_is_rejected_before_its_body(impatient: ServedEngine, home: Path) -> None:
    with connected(impatient) as wire:
        wire.sendall(head(impatient, "create_session", 1000, key="tml-wrong") + b"{")
        assert wire.recv(65_536).startswith(b"HTTP/1.1 401")
        wire.sendall(b" ")
        assert b"HTTP/1.1" not in rest_of(wire), "the server has closed the connection"


def the_second_call_of_a_connection_is_watched_like_the_first(impatient: ServedEngine, home: Path) -> None:
    with connected(impatient) as wire:
        wire.sendall(head(impatient, "create_session", 2) + b"{}")
        assert wire.recv(65_536).startswith(b"HTTP/1.1 200")
        wire.sendall(head(impatient, "create_session", 1000))
        status, _ = read_answer(rest_of(wire))
    assert status == 408


def a_body_that_comes_slowly_is_taken(impatient: ServedEngine, home: Path) -> None:
    # What has arrived gives the rest its time: a body has to come at a low rate on average.
    body = b'{"tags": ["slow"], "user_metadata": {"note": "%s"}}' % (b"x" * 30_000)
    first, rest = body[:-6], body[-6:]
    with connected(impatient) as wire:
        began = time.monotonic()
        wire.sendall(head(impatient, "create_session", len(body)) + first)
        for start in range(len(rest)):
            time.sleep(STALL_S / 4)
            wire.sendall(rest[start : start + 1])
        assert time.monotonic() - began > STALL_S
        assert wire.recv(65_536).startswith(b"HTTP/1.1 200")


CHECKS = [
    an_incomplete_body_is_rejected_and_the_connection_closes,
    an_incomplete_upload_is_rejected_and_leaves_no_file,
    incomplete_headers_are_rejected_and_a_silent_connection_is_closed,
    slow_headers_do_not_extend_the_timeout,
    a_request_without_a_key_is_rejected_before_its_body,
    the_second_call_of_a_connection_is_watched_like_the_first,
    a_body_that_comes_slowly_is_taken,
]


@pytest.fixture(scope="module")
def checked(impatient: ServedEngine, home: Path) -> Iterator[dict[str, Future[None]]]:
    """Runs all checks simultaneously: each waits for the server's timeout."""
    with ThreadPoolExecutor(len(CHECKS)) as pool:
        yield {check.__name__: pool.submit(check, impatient, home) for check in CHECKS}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_stalled_requests_time_out_alone(
    check: Callable[[ServedEngine, Path], None], checked: dict[str, Future[None]]
) -> None:
    checked[check.__name__].result(120)


class Stalling(io.RawIOBase):
    """A file that stalls for longer than the server's timeout."""

    def __init__(self) -> None:
        self.reads = 0

    def seekable(self) -> bool:
        return False

    def read(self, size: int = -1) -> bytes:
        self.reads += 1
        if self.reads == 1:
            return PNG
        time.sleep(STALL_S * 3)
        return b""


def test_the_client_gets_an_error_for_a_stalled_file_while_others_are_served(impatient: ServedEngine) -> None:
    rest = tinkex.RestClient(base_url=impatient.url, api_key=impatient.key)
    with pytest.raises(tinkex.APIStatusError, match="no data of this request") as caught:
        rest.upload_asset(("slow.png", Stalling())).result(60)
    assert caught.value.status_code == 408
    with urllib.request.urlopen(f"{impatient.url}/api/v1/healthz", timeout=60) as response:
        assert response.status == 200


@pytest.mark.skipif(not hasattr(select, "poll"), reason="needs poll(2)")
def test_a_client_that_does_not_read_its_replies_is_disconnected(impatient: ServedEngine) -> None:
    with connected(impatient) as wire:
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        metadata = json.dumps({"tags": [], "user_metadata": {"note": "x" * 60_000}}).encode()
        for _ in range(16):
            request = urllib.request.Request(
                f"{impatient.url}/api/v1/create_session",
                metadata,
                {"x-api-key": impatient.key, "content-type": "application/json"},
            )
            with urllib.request.urlopen(request) as reply:
                assert reply.status == 200
        # About 60 MB of replies, far more than the buffers of the system hold.
        for _ in range(60):
            wire.sendall(head(impatient, "sessions/search", 2) + b"{}")
        closed = select.poll()
        closed.register(wire, 0)  # errors and hang-ups only
        assert closed.poll(60_000), "still connected"
