"""Requests over real sockets."""

from __future__ import annotations

import asyncio
import base64
import gzip
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import zstandard

from tests.unit.transport.loopback import (
    Seen,
    Speak,
    babbles,
    breaks_off,
    hangs_up,
    loopback,
    says,
    sleeps,
)
from tinkex._transport.base import Request
from tinkex._transport.caller import Caller
from tinkex._transport.http import HttpTransport
from tinkex._transport.retry import RetryPolicy
from tinkex._wire.endpoints import endpoint
from tinkex.config import Config
from tinkex.errors import (
    APIConnectionError,
    APIStatusError,
    APITimeoutError,
    BadRequestError,
    InternalServerError,
)

QUICK = RetryPolicy(base_s=0.01, cap_s=0.02)


def transport_to(url: str, proxy: str | None = None) -> HttpTransport:
    return HttpTransport(Config(api_key="tml-test", base_url=url, proxy=proxy))


def caller_to(url: str, proxy: str | None = None, policy: RetryPolicy = QUICK) -> Caller:
    config = Config(api_key="tml-test", base_url=url, proxy=proxy)
    return Caller(HttpTransport(config), config, policy=policy)


async def test_a_request_arrives_as_it_was_sent() -> None:
    async with loopback(says(201, b"done", X_Answer="yes")) as server:
        transport = transport_to(server.url + "/prefix")
        reply = await transport.send(
            Request("POST", "/api/v1/runs/a:b", {"x-one": "1"}, b"body", {"q": "a b&c", "n": "2"})
        )
        await transport.close()
    assert (reply.status, reply.body, reply.headers["x-answer"]) == (201, b"done", "yes")
    seen = server.seen[0]
    assert (seen.method, seen.target, seen.body) == ("POST", "/prefix/api/v1/runs/a:b?q=a+b%26c&n=2", b"body")
    assert seen.headers["x-one"] == "1"
    assert {"gzip", "zstd"} <= set(seen.headers["accept-encoding"].replace(" ", "").split(","))


async def test_connections_are_kept_and_each_purpose_has_its_own() -> None:
    async with loopback(says()) as server:
        transport = transport_to(server.url)
        for _ in range(3):
            await transport.send(Request("GET", "/a", purpose="train"))
        assert server.connections == 1
        await transport.send(Request("GET", "/a", purpose="session"))
        assert server.connections == 2
        await transport.close()


async def test_pending_polls_delay_no_other_requests() -> None:
    async def speak(seen: Seen, writer: asyncio.StreamWriter) -> None:
        await (sleeps if seen.target == "/poll" else says())(seen, writer)

    async with loopback(speak) as server:
        transport = transport_to(server.url)
        polls = [
            asyncio.ensure_future(transport.send(Request("POST", "/poll", purpose="retrieve")))
            for _ in range(100)
        ]
        while len(server.seen) < 100:  # noqa: ASYNC110 - set by another thread
            await asyncio.sleep(0.01)
        reply = await transport.send(Request("POST", "/heartbeat", purpose="session", timeout=10))
        assert reply.status == 200
        for poll in polls:
            poll.cancel()
        await asyncio.gather(*polls, return_exceptions=True)
        await transport.close()


@pytest.mark.parametrize(
    ("speak", "words"),
    [(hangs_up, "closed"), (breaks_off, "end of file|body"), (babbles, "HTTP")],
    ids=["before the headers", "in the body", "no HTTP"],
)
async def test_a_broken_reply_is_a_connection_error(speak: Speak, words: str) -> None:
    async with loopback(speak) as server:
        transport = transport_to(server.url)
        with pytest.raises(APIConnectionError, match=words) as caught:
            await transport.send(Request("POST", "/api/v1/x"))
        await transport.close()
    assert not isinstance(caught.value, APITimeoutError)
    assert caught.value.request is not None
    assert caught.value.request.url == f"{server.url}/api/v1/x"


async def test_no_server_is_a_connection_error_that_names_it() -> None:
    async with loopback(says()) as server:
        pass
    transport = transport_to(server.url)
    with pytest.raises(APIConnectionError, match=f"{server.url}.*refused"):
        await transport.send(Request("GET", "/x"))
    await transport.close()


async def test_a_slow_server_is_a_timeout() -> None:
    async with loopback(sleeps) as server:
        transport = transport_to(server.url)
        with pytest.raises(APITimeoutError, match=r"within 0\.1 s"):
            await transport.send(Request("GET", "/x", timeout=0.1))
        await transport.close()


@pytest.mark.parametrize(
    ("encoding", "body"),
    [("gzip", gzip.compress(b'{"status":"ok"}')), ("zstd", zstandard.compress(b'{"status":"ok"}'))],
    ids=["gzip", "zstd"],
)
async def test_compressed_replies_are_read(encoding: str, body: bytes) -> None:
    async with loopback(says(200, body, Content_Encoding=encoding)) as server:
        caller = caller_to(server.url)
        assert (await caller.call(endpoint("healthz"))).status == "ok"
        await caller.close()


async def test_trouble_that_passes_is_not_noticed() -> None:
    ok = says(200, b'{"status":"ok"}')
    async with loopback(hangs_up, says(503), breaks_off, says(429, Retry_After="0.01"), ok) as server:
        caller = caller_to(server.url)
        assert (await caller.call(endpoint("healthz"))).status == "ok"
        await caller.close()
    assert [seen.headers["x-stainless-retry-count"] for seen in server.seen] == ["0", "1", "2", "3", "4"]


async def test_a_client_error_is_raised_without_retries() -> None:
    async with loopback(says(400, b'{"detail":"no such loss"}')) as server:
        caller = caller_to(server.url)
        with pytest.raises(BadRequestError, match="no such loss"):
            await caller.call(endpoint("healthz"))
        await caller.close()
    assert len(server.seen) == 1


async def test_an_empty_400_is_taken_for_a_proxy_s_and_tried_again() -> None:
    async with loopback(says(400, b""), says(200, b'{"status":"ok"}')) as server:
        caller = caller_to(server.url)
        assert (await caller.call(endpoint("healthz"))).status == "ok"
        await caller.close()


async def test_trouble_that_stays_is_raised_in_the_end() -> None:
    async with loopback(says(503, b'{"detail":"loading"}')) as server:
        caller = caller_to(server.url, policy=RetryPolicy(base_s=0.01, total_s=0.1))
        with pytest.raises(InternalServerError, match="loading"):
            await caller.call(endpoint("healthz"))
        await caller.close()
    assert len(server.seen) > 2


async def test_a_redirect_is_not_followed_because_the_key_would_go_along() -> None:
    async with loopback(says(302, b"", Location="http://elsewhere/")) as server:
        caller = caller_to(server.url)
        with pytest.raises(APIStatusError, match="http://elsewhere/"):
            await caller.call(endpoint("healthz"))
        await caller.close()
    assert len(server.seen) == 1


async def test_requests_go_through_the_proxy_with_its_password() -> None:
    async def relay(seen: Seen, writer: asyncio.StreamWriter) -> None:
        parts = urlsplit(seen.target)
        reader, onward = await asyncio.open_connection(parts.hostname, parts.port)
        onward.write(f"{seen.method} {parts.path} HTTP/1.0\r\nVia: test\r\n\r\n".encode())
        writer.write(await reader.read())
        onward.close()
        writer.close()

    async def ends(seen: Seen, writer: asyncio.StreamWriter) -> None:
        await says(200, b'{"status":"ok"}')(seen, writer)
        writer.close()

    async with loopback(ends) as server, loopback(relay) as proxy:
        caller = caller_to(server.url, proxy=proxy.url.replace("http://", "http://user:word@"))
        assert (await caller.call(endpoint("healthz"))).status == "ok"
        await caller.close()
    assert proxy.seen[0].target == f"{server.url}/api/v1/healthz"
    assert proxy.seen[0].headers["proxy-authorization"] == "Basic " + base64.b64encode(b"user:word").decode()
    assert server.seen[0].headers["via"] == "test"


async def test_a_closed_transport_sends_nothing() -> None:
    async with loopback(says()) as server:
        transport = transport_to(server.url)
        await transport.send(Request("GET", "/x"))
        await transport.close()
        with pytest.raises(APIConnectionError, match="closed"):
            await transport.send(Request("GET", "/x"))


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
def test_a_child_forked_after_the_first_request_through_the_library_raises_instead_of_hanging() -> None:
    program = """
    import asyncio, os
    from tests.unit.transport.loopback import loopback, says
    from tests.unit.transport.test_http import transport_to
    from tinkex._transport.base import Request
    from tinkex.errors import SetupError

    async def main(url):
        await transport_to(url, proxy=url).send(Request("GET", "/x", timeout=5))

    async def parent():
        async with loopback(says()) as server:
            await main(server.url)
            return server.url

    url = asyncio.run(parent())
    child = os.fork()
    if child == 0:
        try:
            asyncio.run(main(url))
        except SetupError as error:
            os._exit(0 if "spawn" in str(error) else 2)
        os._exit(1)
    print(os.waitpid(child, 0)[1])
    """
    root = Path(__file__).parents[3]
    out = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=root,
    )
    assert out.stdout == "0\n"
