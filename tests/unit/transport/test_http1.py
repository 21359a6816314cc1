"""HTTP/1.1 without the library, plain and over TLS: how replies are put together, and how many connections there are."""

from __future__ import annotations

import asyncio
import gc
import os
import ssl

import pytest

from tests.unit.transport.loopback import Seen, Speak, loopback, says, sleeps
from tests.unit.transport.tls import Certificates, certificates
from tinkex._transport.base import Request
from tinkex._transport.http1_transport import Http1Transport
from tinkex.config import Config
from tinkex.errors import APIConnectionError, APITimeoutError


def writes(*pieces: bytes, then_close: bool = False) -> Speak:
    """An answer that arrives piece by piece."""

    async def speak(_: Seen, writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.001)
        if then_close:
            writer.close()

    return speak


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(params=["http", "https"])
def tls(request: pytest.FixtureRequest, files: Certificates) -> ssl.SSLContext | None:
    """The server's side of TLS; None for plain HTTP."""
    return files.context() if request.param == "https" else None


@pytest.fixture(autouse=True)
def trusted(files: Certificates, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(files.authority))


def transport_to(url: str, pool_size: int | None = None) -> Http1Transport:
    return Http1Transport(Config(api_key="tml-test", base_url=url, pool_size=pool_size))


async def ask(url: str, times: int = 1) -> list[tuple[int, bytes]]:
    plain = transport_to(url)
    try:
        replies = [await plain.send(Request("POST", "/x", timeout=5)) for _ in range(times)]
        return [(reply.status, reply.body) for reply in replies]
    finally:
        await plain.close()


@pytest.mark.parametrize(
    "speak",
    [
        writes(b"HTTP/1.1 200 OK\r\nContent-Le", b"ngth: 5\r\n\r", b"\nhe", b"llo"),
        writes(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"),
        writes(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2;x=y\r\nlo\r\n0\r\n\r\n"),
        writes(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhe", b"llo\r\n0\r\nA: b\r\n\r\n"),
        writes(b"HTTP/1.1 200 OK\r\n\r\nhel", b"lo", then_close=True),
        writes(b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello", then_close=True),
        writes(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 5\r\n\r\nhello"),
    ],
    ids=["in pieces", "interim", "chunked", "trailers", "until the end", "old", "closing"],
)
async def test_replies_of_every_form_are_read(speak: Speak, tls: ssl.SSLContext | None) -> None:
    async with loopback(speak, tls=tls) as server:
        assert await ask(server.url, times=2) == [(200, b"hello")] * 2


async def test_a_reply_without_a_body_needs_no_length(tls: ssl.SSLContext | None) -> None:
    async with loopback(writes(b"HTTP/1.1 204 No Content\r\n\r\n"), tls=tls) as server:
        assert await ask(server.url, times=2) == [(204, b"")] * 2
    assert server.connections == 1


@pytest.mark.parametrize(
    ("speak", "words"),
    [
        (writes(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999\r\n\r\n"), "larger than"),
        (writes(b"HTTP/1.1 200 OK\r\nContent-Length: -3\r\n\r\n"), "not a number"),
        (writes(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffffff\r\n"), "larger than"),
        (writes(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nsoup\r\n"), "not HTTP"),
        (
            writes(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;" + b"x" * 100_000),
            "a chunk does not end",
        ),
        (
            writes(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + b"A: b\r\n" * 20_000),
            "trailers do not end",
        ),
        (writes(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhello"), "longer than its content-length"),
        (writes(b"HTTP/1.1 200 OK\r\nno colon here\r\n\r\n"), "without a colon"),
        (writes(b"HTTP/1.1 2x0 OK\r\n\r\n"), "no status line"),
        (writes(b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 20_000), "headers do not end"),
        (writes(b"SSH-2.0-OpenSSH"), "not HTTP"),
        (says(200, b"zzzz", Content_Encoding="gzip"), "decompressed"),
        (says(200, b"zzzz", Content_Encoding="zstd"), "decompressed"),
        (says(200, b"zzzz", Content_Encoding="br"), "was not requested"),
    ],
)
async def test_a_reply_that_is_not_http_is_a_connection_error(
    speak: Speak, words: str, tls: ssl.SSLContext | None
) -> None:
    async with loopback(speak, tls=tls) as server:
        with pytest.raises(APIConnectionError, match=words):
            await ask(server.url)


async def test_a_fast_server_needs_fewer_connections_than_there_are_requests() -> None:
    async with loopback(says()) as server:
        plain = transport_to(server.url)
        await asyncio.gather(*(plain.send(Request("POST", "/x")) for _ in range(500)))
        assert len(server.seen) == 500
        assert server.connections < 500
        await plain.close()


async def test_a_pool_never_has_more_connections_than_it_may(tls: ssl.SSLContext | None) -> None:
    async with loopback(says(), tls=tls) as server:
        plain = transport_to(server.url, pool_size=3)
        await asyncio.gather(*(plain.send(Request("POST", "/x")) for _ in range(30)))
        assert len(server.seen) == 30
        assert server.connections <= 3
        await plain.close()


@pytest.mark.slow
async def test_requests_that_wait_for_replies_do_not_wait_for_connections() -> None:
    everybody = asyncio.Event()

    async def speak(seen: Seen, writer: asyncio.StreamWriter) -> None:
        if len(server.seen) == 300:
            everybody.set()
        await everybody.wait()
        await says()(seen, writer)

    async with loopback(speak) as server:
        plain = transport_to(server.url)
        replies = await asyncio.gather(*(plain.send(Request("POST", "/x")) for _ in range(300)))
        assert [reply.status for reply in replies] == [200] * 300
        await plain.close()


async def test_a_cancelled_request_closes_its_own_connection_only(tls: ssl.SSLContext | None) -> None:
    async def speak(seen: Seen, writer: asyncio.StreamWriter) -> None:
        await (sleeps if seen.target == "/slow" else says())(seen, writer)

    async with loopback(speak, tls=tls) as server:
        plain = transport_to(server.url)
        slow = asyncio.ensure_future(plain.send(Request("POST", "/slow")))
        while not server.seen:  # noqa: ASYNC110 - set by the server
            await asyncio.sleep(0.001)
        slow.cancel()
        with pytest.raises(asyncio.CancelledError):
            await slow
        with pytest.raises(APITimeoutError, match=r"/slow within 0\.05 s"):
            await plain.send(Request("POST", "/slow", timeout=0.05))
        assert (await plain.send(Request("POST", "/quick"))).status == 200
        await plain.close()


async def test_a_connection_the_server_closed_meanwhile_is_not_used_again(tls: ssl.SSLContext | None) -> None:
    async def ends(seen: Seen, writer: asyncio.StreamWriter) -> None:
        await says()(seen, writer)
        await writer.drain()
        writer.close()

    async with loopback(ends, tls=tls) as server:
        plain = transport_to(server.url)
        for _ in range(3):
            assert (await plain.send(Request("POST", "/x"))).status == 200
            while server.tasks:  # noqa: ASYNC110 -- ends when the server has closed the connection
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.02)  # until the client receives that
        await plain.close()
    assert server.connections == 3


async def test_a_garbage_collected_client_leaves_no_open_connection(tls: ssl.SSLContext | None) -> None:
    async def speak(seen: Seen, writer: asyncio.StreamWriter) -> None:
        await says()(seen, writer)

    async with loopback(speak, tls=tls) as server:
        plain = transport_to(server.url)
        await plain.send(Request("POST", "/x"))
        del plain
        gc.collect()
        while server.tasks:  # noqa: ASYNC110 -- ends when the server sees the connection closed
            await asyncio.sleep(0.01)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
async def test_a_forked_child_makes_connections_of_its_own(tls: ssl.SSLContext | None) -> None:
    async with loopback(says(200, b"hello"), tls=tls) as server:
        plain = transport_to(server.url)
        await plain.send(Request("POST", "/x"))
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:  # a loop of its own, in a process of its own
            asyncio._set_running_loop(None)  # noqa: SLF001 - for event loops, and this is a fork of one
            try:
                loop = asyncio.new_event_loop()
                reply = loop.run_until_complete(plain.send(Request("POST", "/x", timeout=5)))
                os.write(writer, reply.body)
            finally:
                os._exit(0)
        os.close(writer)
        said = await asyncio.to_thread(os.read, reader, 100)
        os.close(reader)
        await asyncio.to_thread(os.waitpid, child, 0)
        assert said == b"hello"
        assert server.connections == 2
        assert (await plain.send(Request("POST", "/x"))).body == b"hello"
        await plain.close()


@pytest.mark.parametrize("host", ["a" * 70 + ".example", "two..dots"])
async def test_an_invalid_host_name_is_a_connection_error(host: str) -> None:
    transport = transport_to(f"http://{host}:8787")
    with pytest.raises(APIConnectionError, match="not a valid host name"):
        async with asyncio.timeout(30):
            await transport.send(Request("GET", "/api/v1/healthz", timeout=60.0))
    await transport.close()
