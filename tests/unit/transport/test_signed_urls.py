"""Signed URLs of foreign hosts: fetched as they are, with retries and redirects, and without anything private."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.unit.transport.loopback import Seen, breaks_off, hangs_up, loopback, says, sleeps
from tinkex import circuit_breakers
from tinkex._transport.signed_urls import MAX_REDIRECTS, SignedUrls
from tinkex.config import Config
from tinkex.errors import (
    APIConnectionError,
    APITimeoutError,
    CircuitOpenError,
    InternalServerError,
    PermissionDeniedError,
    SetupError,
)
from tinkex.observability.events import Event, RequestFinished, RetryScheduled

PATH = "/bucket/a%2Fb/f+ile~1.json?X-Signature=ab%2Bc%3D&X-Expires=60&flag"


def config_with_secrets(**settings: Any) -> Config:
    return Config(
        api_key="tml-test-0123456789",
        base_url="http://api.example",
        default_headers={"authorization": "Bearer private"},
        default_query={"tenant": "private"},
        cloudflare_client_secret="private",
        **settings,
    )


class Recorder:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)


async def read(url: str, sink: Recorder | None = None, **settings: Any) -> bytes:
    urls = SignedUrls(config_with_secrets(**settings), sink=sink)
    try:
        return await urls.read(url)
    finally:
        await urls.close()


async def test_the_target_arrives_byte_for_byte_and_nothing_private_with_it() -> None:
    async with loopback(says(200, b"content")) as server:
        assert await read(server.url + PATH) == b"content"
    seen = server.seen[0]
    assert (seen.method, seen.target) == ("GET", PATH)
    assert set(seen.headers) == {"host", "accept", "accept-encoding", "user-agent"}
    assert "private" not in str(seen)


@pytest.mark.parametrize("behind_proxy", [False, True])
async def test_the_target_is_the_same_through_the_library(behind_proxy: bool) -> None:
    async with loopback(says(200, b"content")) as server:
        settings = {"proxy": server.url} if behind_proxy else {}
        assert await read(server.url + PATH, **settings) == b"content"
    assert server.seen[0].target == (server.url if behind_proxy else "") + PATH


async def test_characters_that_no_request_line_carries_are_quoted() -> None:
    async with loopback(says()) as server:
        await read(f"{server.url}/ä file?name=ü\x01 x#fragment")
    assert server.seen[0].target == "/%C3%A4%20file?name=%C3%BC%01%20x"


@pytest.mark.slow
async def test_failures_are_retried_and_reported_as_those_of_any_call() -> None:
    recorder = Recorder()
    async with loopback(hangs_up, says(503, Retry_After="0.01"), breaks_off, says(200, b"ok")) as server:
        assert await read(f"{server.url}/file", recorder) == b"ok"
    assert len(server.seen) == 4
    assert {event.endpoint for event in recorder.events if isinstance(event, RequestFinished)} == {
        "signed_url"
    }
    assert sum(isinstance(event, RetryScheduled) for event in recorder.events) == 3


async def test_retries_end_with_the_limit_of_the_configuration() -> None:
    async with loopback(says(503)) as server:
        with pytest.raises(InternalServerError):
            await read(f"{server.url}/file", max_retries=0)
    assert len(server.seen) == 1


async def test_the_timeout_of_the_configuration_holds() -> None:
    async with loopback(sleeps) as server:
        with pytest.raises(APITimeoutError, match=r"0\.1 s"):
            await read(f"{server.url}/file", max_retries=0, timeout=0.1)


async def test_a_host_that_keeps_failing_opens_its_circuit_breaker() -> None:
    async with loopback(says(503)) as server:
        urls = SignedUrls(config_with_secrets(max_retries=0))
        for _ in range(5):
            with pytest.raises(InternalServerError):
                await urls.read(f"{server.url}/file")
        with pytest.raises(CircuitOpenError):
            await urls.open(f"{server.url}/file", headers={})
        await urls.close()
        assert circuit_breakers.state(server.url, "signed_url") == "open"
    assert len(server.seen) == 5


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_redirects_are_followed_to_other_hosts(status: int) -> None:
    async with (
        loopback(says(200, b"there")) as storage,
        loopback(says(status, b"", Location=f"{storage.url}{PATH}")) as server,
    ):
        assert await read(f"{server.url}/file?token=a-private-token") == b"there"
    assert storage.seen[0].target == PATH
    assert "private" not in str(storage.seen)


async def test_a_redirect_may_be_relative_and_quote_the_signature() -> None:
    async with loopback(says(302, b"", Location="other?signature=0123456789"), says(200, b"there")) as server:
        assert await read(f"{server.url}/folder/file?signature=0123456789") == b"there"
    assert server.seen[1].target == "/folder/other?signature=0123456789"


async def test_the_number_of_redirects_is_limited() -> None:
    async with loopback(says(302, b"", Location="/again")) as server:
        with pytest.raises(APIConnectionError, match=f"more than {MAX_REDIRECTS} times"):
            await read(f"{server.url}/again")
    assert len(server.seen) == MAX_REDIRECTS + 1


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "ftp://host/a", "https://user:word@host/a", "/relative", "https:///a"]
)
async def test_what_is_not_a_web_url_is_rejected(url: str) -> None:
    with pytest.raises(SetupError, match="not a signed http or https URL") as raised:
        await read(url)
    assert "word" not in str(raised.value)


async def test_a_redirect_to_a_file_of_this_machine_is_rejected() -> None:
    async with loopback(says(302, b"", Location="file:///etc/passwd")) as server:
        with pytest.raises(SetupError):
            await read(f"{server.url}/a")


async def test_errors_show_neither_path_nor_signature() -> None:
    async def quotes(seen: Seen, writer: asyncio.StreamWriter) -> None:
        await says(403, f"<Error>{seen.target}</Error>".encode())(seen, writer)

    async with loopback(quotes) as server:
        with pytest.raises(PermissionDeniedError, match="may have expired") as raised:
            await read(f"{server.url}/a-secret-token/adapter.tar?signature=0123456789abcdef")
    shown = f"{raised.value} {raised.value.request} {raised.value.response}"
    assert f"{server.url}/…/adapter.tar" in shown
    assert "secret-token" not in shown
    assert "0123456789abcdef" not in shown


async def test_connection_errors_show_no_signature() -> None:
    async with loopback(says()) as server:
        pass
    for settings in ({}, {"proxy": server.url}):
        with pytest.raises(APIConnectionError) as raised:
            await read(f"{server.url}/a-secret-token/a?signature=0123456789", max_retries=0, **settings)
        shown = f"{raised.value} {raised.value.request}"
        assert "secret" not in shown
        assert "0123456789" not in shown


async def test_a_stream_is_read_while_it_arrives() -> None:
    more = asyncio.Event()

    async def slow(_: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 206 Partial\r\nContent-Length: 6\r\nETag: x\r\n\r\nfir")
        await writer.drain()
        await more.wait()
        writer.write(b"st!")

    async with loopback(slow) as server:
        urls = SignedUrls(config_with_secrets())
        stream = await urls.open(f"{server.url}/file", headers={"range": "bytes=3-"})
        assert (stream.status, stream.headers["etag"]) == (206, "x")
        assert await stream.read() == b"fir"
        more.set()
        assert await stream.read() == b"st!"
        assert await stream.read() == b""
        await urls.close()
    assert server.seen[0].headers["range"] == "bytes=3-"
    assert server.seen[0].headers["accept-encoding"] == "identity"
