"""A server cannot make the client hold more than it accepts, or wait longer than its timeout."""

from __future__ import annotations

import asyncio
import gzip
import tracemalloc

import pytest
import zstandard

from tests.unit.transport.loopback import Seen, Speak, loopback
from tinkex._transport.base import Request
from tinkex._transport.caller import Caller
from tinkex._transport.http import HttpTransport
from tinkex._transport.http1 import MIN_EXPANDED_BYTES, STEP_BYTES, decompress
from tinkex._transport.http1_stream import Http1Stream
from tinkex._transport.multipart import Form
from tinkex._transport.streaming import send_upload
from tinkex._wire.endpoints import endpoint
from tinkex.config import Config
from tinkex.errors import APIResponseValidationError, APITimeoutError, BadRequestError

ROUTES = ["plain", "library"]
"""Straight over a socket, and by the library that does TLS and proxies: there the server of the test is the proxy."""

COMPRESSORS = {"gzip": gzip.compress, "zstd": zstandard.compress}


def config_for(route: str, url: str) -> Config:
    if route == "plain":
        return Config(base_url=url, api_key="tml-x")
    return Config(base_url="http://behind.the.proxy", proxy=url, api_key="tml-x")


def compressed(body: bytes, encoding: str) -> Speak:
    head = b"HTTP/1.1 200 OK\r\nContent-Encoding: %b\r\nContent-Length: %d\r\n\r\n"

    async def speak(_: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(head % (encoding.encode(), len(body)) + body)

    return speak


def trickling(status: int) -> Speak:
    async def speak(_: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 %d X\r\nContent-Length: 1000000\r\n\r\n" % status)
        while True:
            writer.write(b" ")
            await writer.drain()
            await asyncio.sleep(0.01)

    return speak


@pytest.fixture(scope="module")
def bombs() -> dict[str, bytes]:
    plain = bytes(2 * MIN_EXPANDED_BYTES)
    return {encoding: compress(plain) for encoding, compress in COMPRESSORS.items()}


@pytest.mark.slow
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("encoding", COMPRESSORS)
async def test_a_reply_that_expands_too_much_is_rejected_and_not_requested_again(
    route: str, encoding: str, bombs: dict[str, bytes]
) -> None:
    async with loopback(compressed(bombs[encoding], encoding)) as server:
        config = config_for(route, server.url)
        caller = Caller(HttpTransport(config), config)
        tracemalloc.start()
        try:
            with pytest.raises(APIResponseValidationError, match="expand to more than"):
                await caller.call(endpoint("healthz"))
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
            await caller.close()
        assert len(server.seen) == 1
        assert peak < 3 * MIN_EXPANDED_BYTES


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("encoding", COMPRESSORS)
async def test_compressed_replies_are_decompressed(route: str, encoding: str) -> None:
    body = b'{"status": "ok"}' + b" " * 10_000
    async with loopback(compressed(COMPRESSORS[encoding](body), encoding)) as server:
        transport = HttpTransport(config_for(route, server.url))
        try:
            assert (await transport.send(Request("GET", "/x", timeout=30))).body == body
        finally:
            await transport.close()


def test_a_large_reply_may_expand_by_its_ratio() -> None:
    text = b"".join(b'{"logprob": -%d.%06d},' % (n % 7, n * 7919 % 10**6) for n in range(100_000))
    assert decompress(zstandard.compress(text), "zstd") == text


async def test_a_chunk_of_a_stream_never_expands_to_much_more_than_a_chunk() -> None:
    body = gzip.compress(bytes(20 * STEP_BYTES))
    async with loopback(compressed(body, "gzip")) as server:
        stream = await Http1Stream.open(server.url, Request("GET", "/x", timeout=30))
        sizes = []
        while chunk := await stream.read():
            sizes.append(len(chunk))
        await stream.close()
    assert sum(sizes) == 20 * STEP_BYTES
    assert max(sizes) <= STEP_BYTES


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.slow
async def test_the_reply_to_an_upload_is_complete_within_the_timeout(route: str) -> None:
    form = Form({}, [("a.png", b"PNG")])
    async with loopback(trickling(200)) as server:
        transport = HttpTransport(config_for(route, server.url))
        request = Request("POST", "/x", {"content-type": form.content_type}, timeout=0.3, upload=form)
        try:
            with pytest.raises(APITimeoutError, match="not complete within"):
                await asyncio.wait_for(send_upload(transport, request), 60)
        finally:
            await transport.close()


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.slow
async def test_the_body_of_an_error_is_awaited_no_longer_than_the_timeout(route: str) -> None:
    async with loopback(trickling(400)) as server:
        config = config_for(route, server.url)
        caller = Caller(HttpTransport(config), config)
        request = Request("POST", "/x", timeout=0.3)
        try:
            with pytest.raises(BadRequestError):
                await asyncio.wait_for(caller.open_stream(endpoint("stream_sample"), request), 60)
        finally:
            await caller.close()


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.slow
async def test_a_reply_is_complete_within_the_timeout(route: str) -> None:
    async with loopback(trickling(200)) as server:
        transport = HttpTransport(config_for(route, server.url))
        try:
            with pytest.raises(APITimeoutError):
                await asyncio.wait_for(transport.send(Request("GET", "/x", timeout=0.3)), 60)
        finally:
            await transport.close()
