"""The client's own connections over TLS: what they check, what they say, and what a proxy may do to them."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.recording import Recorder
from tests.unit.transport.loopback import Loopback, Seen, Speak, loopback, says, sleeps
from tests.unit.transport.proxies import http_proxy
from tests.unit.transport.tls import Certificates, certificates
from tinkex._transport.base import Request
from tinkex._transport.caller import Caller
from tinkex._transport.http import HttpTransport
from tinkex._transport.retry import RetryPolicy
from tinkex._wire.endpoints import endpoint
from tinkex.config import Config
from tinkex.errors import APIConnectionError, APITimeoutError
from tinkex.observability.events import RetryScheduled

KEY = "tml-test-0123456789"
QUICK = RetryPolicy(base_s=0.01, cap_s=0.02)
OK = says(200, b'{"status":"ok"}')
ASK = Request("GET", "/api/v1/healthz", timeout=30.0)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(autouse=True)
def no_proxies_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


def config_to(url: str, ca_file: Path | None, **options: Any) -> Config:
    return Config(api_key=KEY, base_url=url, ca_file=ca_file, **options)


@asynccontextmanager
async def caller_to(config: Config, sink: Recorder | None = None) -> AsyncIterator[Caller]:
    caller = Caller(HttpTransport(config), config, policy=QUICK, sink=sink)
    try:
        yield caller
    finally:
        await caller.close()


async def rejected(config: Config) -> str:
    """Why a call fails that is not retried."""
    events = Recorder()
    async with caller_to(config, events) as caller:
        with pytest.raises(APIConnectionError) as caught:
            await caller.call(endpoint("healthz"))
    assert events.of(RetryScheduled) == []
    assert KEY not in str(caught.value)
    return str(caught.value)


# ---- certificates ----


async def test_a_certificate_of_an_unknown_authority_is_rejected_without_retries(files: Certificates) -> None:
    async with loopback(OK, tls=files.context()) as server:
        message = await rejected(config_to(server.url, None))
    assert "certificate was rejected" in message
    assert "ca_file=…" in message
    assert "SSL_CERT_FILE" in message
    assert server.seen == []


async def test_a_certificate_for_another_name_is_rejected(tmp_path: Path) -> None:
    files = certificates(tmp_path, host="elsewhere.example")
    async with loopback(OK, tls=files.context()) as server:
        message = await rejected(config_to(server.url.replace("127.0.0.1", "localhost"), files.authority))
    assert "for another name" in message
    assert "'localhost'" in message
    assert "Use a name in the URL" in message
    assert server.seen == []


@pytest.mark.parametrize(
    ("days_valid", "words"),
    [((-3, -1), "has expired. Renew it"), ((1, 3), "is not valid yet. Check the clocks")],
    ids=["expired", "not yet valid"],
)
async def test_a_certificate_is_rejected_outside_its_time(
    days_valid: tuple[int, int], words: str, tmp_path: Path
) -> None:
    files = certificates(tmp_path, days_valid=days_valid)
    async with loopback(OK, tls=files.context()) as server:
        assert words in await rejected(config_to(server.url, files.authority))


async def test_a_certificate_is_trusted_if_it_is_itself_the_ca_file(files: Certificates) -> None:
    async with (
        loopback(OK, tls=files.context()) as server,
        caller_to(config_to(server.url, files.server)) as caller,
    ):
        assert (await caller.call(endpoint("healthz"))).status == "ok"


async def test_a_ca_file_that_is_not_a_certificate_is_named(files: Certificates, tmp_path: Path) -> None:
    broken = tmp_path / "broken.pem"
    broken.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    async with loopback(OK, tls=files.context()) as server:
        transport = HttpTransport(config_to(server.url, broken))
        with pytest.raises(APIConnectionError, match=r"broken\.pem.*cannot be read"):
            await transport.send(ASK)
        await transport.close()


# ---- the handshake ----


async def test_the_server_learns_the_name_and_the_protocol(files: Certificates) -> None:
    names: list[str | None] = []
    context = files.context("h2", "http/1.1")
    context.sni_callback = lambda _, name, __: names.append(name)
    async with loopback(OK, tls=context) as server:
        for host in ("localhost", "127.0.0.1"):
            transport = HttpTransport(config_to(server.url.replace("127.0.0.1", host), files.authority))
            assert (await transport.send(ASK)).status == 200
            await transport.close()
    assert names == ["localhost", None]  # an address is not a server name
    assert [each.selected_alpn_protocol() for each in server.secured] == ["http/1.1", "http/1.1"]
    assert {each.version() for each in server.secured} == {"TLSv1.3"}


@pytest.mark.slow
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_a_new_connection_resumes_the_session_of_the_last_one(
    version: ssl.TLSVersion, files: Certificates
) -> None:
    context = files.context()
    context.maximum_version = version
    async with loopback(says(200, b"{}", Connection="close"), tls=context) as server:
        transport = HttpTransport(config_to(server.url, files.authority))
        for purpose in ("rest", "rest", "session"):
            assert (await transport.send(Request("GET", "/x", purpose=purpose))).status == 200
        await transport.close()
    assert [each.session_reused for each in server.secured] == [False, True, True]


async def test_the_error_for_a_server_without_tls_names_it() -> None:
    async def greets(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()

    async with listening(greets) as port:
        transport = HttpTransport(config_to(f"https://127.0.0.1:{port}", None))
        with pytest.raises(APIConnectionError, match=r"does not speak TLS on this port. Use http://"):
            await transport.send(ASK)
        await transport.close()


async def test_a_handshake_that_is_cut_off_is_a_connection_error() -> None:
    async def hangs_up(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.read(100)

    async with listening(hangs_up) as port:
        transport = HttpTransport(config_to(f"https://127.0.0.1:{port}", None))
        with pytest.raises(APIConnectionError, match="closed the connection during the TLS handshake"):
            await transport.send(ASK)
        await transport.close()


async def test_a_handshake_that_does_not_end_is_a_timeout() -> None:
    async def waits(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.read()

    async with listening(waits) as port:
        transport = HttpTransport(config_to(f"https://127.0.0.1:{port}", None))
        for purpose in ("rest", "session"):
            with pytest.raises(APITimeoutError, match=r"within 0\.05 s"):
                await transport.send(Request("GET", "/x", timeout=0.05, purpose=purpose))
        await transport.close()


# ---- connections ----


async def test_connections_over_tls_are_kept_and_each_purpose_has_its_own(files: Certificates) -> None:
    async with loopback(OK, tls=files.context()) as server:
        transport = HttpTransport(config_to(server.url, files.authority))
        for _ in range(3):
            await transport.send(Request("GET", "/a", purpose="train"))
        assert server.connections == 1
        await transport.send(Request("GET", "/a", purpose="session"))
        assert server.connections == 2
        await transport.close()


@pytest.mark.slow
async def test_a_large_request_and_a_large_reply_arrive_whole(files: Certificates) -> None:
    content = bytes(range(256)) * 20_000

    async def echoes(seen: Seen, writer: asyncio.StreamWriter) -> None:
        await says(200, seen.body)(seen, writer)

    async with loopback(echoes, tls=files.context()) as server:
        transport = HttpTransport(config_to(server.url, files.authority))
        assert (await transport.send(Request("POST", "/x", body=content))).body == content
        await transport.close()


async def cuts(_: Seen, writer: asyncio.StreamWriter) -> None:
    """Ends the connection as an attacker could: without the end of TLS."""
    writer.write(b"HTTP/1.1 200 OK\r\n\r\nhalf")
    await writer.drain()
    writer.transport.abort()


async def test_a_reply_without_a_length_that_is_cut_off_is_not_taken_for_a_whole_one(
    files: Certificates,
) -> None:
    async with loopback(cuts, tls=files.context()) as server:
        transport = HttpTransport(config_to(server.url, files.authority))
        with pytest.raises(APIConnectionError, match="in the middle of the body"):
            await transport.send(ASK)
        await transport.close()


async def test_trouble_over_tls_that_passes_is_not_noticed(files: Certificates) -> None:
    async def ends(_: Seen, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with (
        loopback(ends, says(503), cuts, OK, tls=files.context()) as server,
        caller_to(config_to(server.url, files.authority)) as caller,
    ):
        assert (await caller.call(endpoint("healthz"))).status == "ok"
    assert [seen.headers["x-stainless-retry-count"] for seen in server.seen] == ["0", "1", "2", "3"]


# ---- proxies ----


@asynccontextmanager
async def proxied(
    answer: Speak, proxy_url: Callable[[str], str] = str
) -> AsyncIterator[tuple[Loopback, Config]]:
    """A proxy that answers a CONNECT like this, and the configuration of a client behind it."""
    async with loopback(answer) as proxy:
        yield proxy, config_to("https://server.example:8443/prefix", None, proxy=proxy_url(proxy.url))


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (407, "status 407. Give it a user and a password, as proxy=http://user:password@host:port"),
        (403, "status 403. Ask its operator to allow this host and port"),
    ],
)
async def test_a_proxy_that_rejects_the_tunnel_is_not_tried_again(status: int, words: str) -> None:
    async with proxied(says(status, b"no")) as (proxy, config):
        message = await rejected(config)
    assert f"the proxy refused CONNECT to server.example:8443 with {words}" in message
    assert f"through the proxy {proxy.url}" in message
    assert [(seen.method, seen.target) for seen in proxy.seen] == [("CONNECT", "server.example:8443")]
    assert "x-api-key" not in proxy.seen[0].headers


async def test_a_proxy_that_cannot_reach_the_server_is_tried_again(files: Certificates) -> None:
    with http_proxy(refusals=(502, 504)) as proxy:
        async with loopback(OK, tls=files.context()) as server:
            config = config_to(server.url, files.authority, proxy=proxy.url)
            async with caller_to(config) as caller:
                assert (await caller.call(endpoint("healthz"))).status == "ok"
    assert len(proxy.tunnels) == 3


async def garbles(_: Seen, writer: asyncio.StreamWriter) -> None:
    writer.write(b"220 mail ready\r\n\r\n")


async def closes(_: Seen, writer: asyncio.StreamWriter) -> None:
    writer.close()


async def floods(_: Seen, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 20_000)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (garbles, "to CONNECT is not HTTP"),
        (closes, "the proxy closed the connection before it replied to CONNECT"),
        (floods, "headers of the proxy's reply do not end"),
    ],
)
async def test_a_proxy_that_fails_is_a_connection_error(answer: Speak, words: str) -> None:
    async with proxied(answer) as (_, config):
        transport = HttpTransport(config)
        with pytest.raises(APIConnectionError, match=words):
            await transport.send(ASK)
        await transport.close()


async def test_a_proxy_that_never_replies_is_a_timeout_and_its_password_is_not_shown() -> None:
    async with proxied(sleeps, lambda url: url.replace("http://", "http://user:hidden@")) as (_, config):
        transport = HttpTransport(config)
        with pytest.raises(APITimeoutError, match=r"within 0\.05 s") as caught:
            await transport.send(Request("GET", "/x", timeout=0.05))
        await transport.close()
    assert "hidden" not in str(caught.value)


async def test_the_certificate_of_an_https_proxy_is_checked_too(files: Certificates) -> None:
    async with loopback(OK, tls=files.context()) as proxy:
        message = await rejected(config_to("https://server.example", None, proxy=proxy.url))
    assert "certificate was rejected" in message
    assert f"through the proxy {proxy.url}" in message


# ---- servers below HTTP ----


@asynccontextmanager
async def listening(
    serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[int]:
    """Serves connections below HTTP; ends when the client has closed them all."""
    tasks: set[asyncio.Future[None]] = set()

    async def run(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await serve(reader, writer)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.ensure_future(run(reader, writer)))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await asyncio.gather(*tasks)
