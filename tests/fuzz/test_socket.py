"""Invalid HTTP on the socket, to a server in its own process."""

from __future__ import annotations

import json
import socket
import urllib.request

import pytest

from tests.servers import ServedEngine

pytestmark = pytest.mark.slow

HEAD = b"POST /api/v1/create_session HTTP/1.1\r\nHost: x\r\n"


def talk(server: ServedEngine, *chunks: bytes) -> bytes:
    """Sends chunks, shuts down the sending side, and returns the response until the server closes."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as wire:
        try:
            for piece in chunks:
                wire.sendall(piece)
            wire.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: wire.recv(65_536), b""))
        except TimeoutError:
            raise
        except OSError:  # rejected while sending; the shutdown then fails because the socket is not connected
            return b""


NONSENSE = {
    "no http": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",),
    "a huge header": (HEAD, b"X-Junk: " + b"j" * 2_000_000 + b"\r\n\r\n"),
    "a thousand headers": (HEAD, *(b"X-%d: y\r\n" % n for n in range(1000)), b"Content-Length: 0\r\n\r\n"),
    "a huge address": (b"GET /api/v1/sessions/" + b"a" * 1_000_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",),
    "an address that is not text": (b"GET /api/v1/sessions/%ff%fe%00 HTTP/1.1\r\nHost: x\r\n\r\n",),
    "half a body": (HEAD, b"Content-Length: 1000\r\n\r\n{"),
    "a length that is none": (HEAD, b"Content-Length: many\r\n\r\n{}"),
    "two lengths": (HEAD, b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}"),
    "a chunk that is none": (HEAD, b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n{}\r\n0\r\n\r\n"),
    "an unknown method": (b"BREW /api/v1/sessions HTTP/1.1\r\nHost: x\r\n\r\n",),
    "an upgrade": (
        b"GET /api/v1/healthz HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    ),
    "paths upwards": (b"GET /../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n",),
    "a header that is not text": (HEAD, b"X-API-Key: \xff\xfe\r\nContent-Length: 2\r\n\r\n{}"),
}


@pytest.mark.parametrize("chunks", NONSENSE.values(), ids=NONSENSE.keys())
def test_invalid_http_is_rejected_and_the_server_stays_up(
    chunks: tuple[bytes, ...], served_engine: ServedEngine
) -> None:
    answer = talk(served_engine, *chunks)
    assert b" 500 " not in answer.partition(b"\r\n")[0]
    request = urllib.request.Request(
        f"{served_engine.url}/api/v1/get_server_capabilities", headers={"X-API-Key": served_engine.key}
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        assert json.loads(response.read())["supported_models"]


def test_endless_headers_are_cut_off_and_large_bodies_are_not(served_engine: ServedEngine) -> None:
    host, port = served_engine.url.removeprefix("http://").split(":")
    sent = 0
    with socket.create_connection((host, int(port)), timeout=30) as wire:
        wire.sendall(HEAD + b"X-Endless: ")
        try:
            while sent < 64 << 20:
                sent += wire.send(b"j" * 65_536)
        except ConnectionError:
            pass
    assert sent < 32 << 20
    body = b'{"events":[]' + b" " * 3_000_000 + b"}"
    head = (
        HEAD.replace(b"create_session", b"telemetry")
        + f"X-API-Key: {served_engine.key}\r\nConnection: close\r\n".encode()
    )
    # Large bodies are decoded on a thread: a client that shuts down its side meanwhile counts as disconnected.
    with socket.create_connection((host, int(port)), timeout=30) as wire:
        wire.sendall(head + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = b"".join(iter(lambda: wire.recv(65_536), b""))
    assert b" 200 OK" in answer.partition(b"\r\n")[0]
