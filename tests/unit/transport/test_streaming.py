from __future__ import annotations

import asyncio
import gzip
from dataclasses import replace

import pytest

from tests.unit.transport.loopback import Loopback, Seen, Speak, loopback
from tinkex._transport.base import Request
from tinkex._transport.http import HttpTransport
from tinkex._transport.http1_stream import Http1Stream
from tinkex._transport.streaming import ResponseStream
from tinkex.config import Config
from tinkex.errors import APIConnectionError, APITimeoutError

ASKED = Request("POST", "/api/v1/stream_sample", {"x-api-key": "k"}, b"{}", timeout=20.0)
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def speak(*parts: bytes, close: bool = False) -> Speak:
    async def say(_: Seen, writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()
        if close:
            writer.close()

    return say


async def opened(server: Loopback, request: Request = ASKED) -> Http1Stream:
    return await Http1Stream.open(server.url, request)


async def whole(stream: ResponseStream) -> bytes:
    body = b""
    try:
        while piece := await stream.read():
            body += piece
    finally:
        await stream.close()
    return body


@pytest.mark.parametrize(
    ("said", "body"),
    [
        ([HEAD, b"5\r\nhello\r\n", b"6;x=1\r\n world\r\n0\r\n\r\n"], b"hello world"),
        ([b"HTTP/1.1 100 Continue\r\n\r\n", HEAD + b"2\r\nok\r\n0\r\n\r\n"], b"ok"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc"], b"abc"),
        ([b"HTTP/1.1 200 OK\r\n\r\nto the end"], b"to the end"),
    ],
)
def test_a_body_comes_out_however_it_is_framed(said: list[bytes], body: bytes) -> None:
    async def run() -> bytes:
        async with loopback(speak(*said, close=True)) as server:
            return await whole(await opened(server))

    assert asyncio.run(run()) == body


def test_a_chunk_is_returned_before_the_next_one_is_sent() -> None:
    async def run() -> None:
        go_on = asyncio.Event()

        async def slowly(_: Seen, writer: asyncio.StreamWriter) -> None:
            writer.write(HEAD + b"5\r\nfirst\r\n")
            await go_on.wait()
            writer.write(b"4\r\nlast\r\n0\r\n\r\n")

        async with loopback(slowly) as server:
            stream = await opened(server)
            assert await stream.read() == b"first"
            go_on.set()
            assert await whole(stream) == b"last"
            assert server.seen[0].headers["x-api-key"] == "k"

    asyncio.run(run())


@pytest.mark.parametrize(
    "said",
    [b"", b"nonsense\r\n\r\n", HEAD + b"zz\r\n", HEAD + b"5\r\nhe", HEAD[:20], HEAD + b"5\r\nhello\r\n"],
)
def test_a_reply_that_breaks_off_or_is_not_http_is_a_connection_error(said: bytes) -> None:
    async def run() -> None:
        async with loopback(speak(said, close=True)) as server:
            with pytest.raises(APIConnectionError, match="no reply"):
                await whole(await opened(server))

    asyncio.run(run())


PACKED = gzip.compress(b"data: 1\n\n" * 50)


def chunked(body: bytes, step: int) -> list[bytes]:
    pieces = [body[start : start + step] for start in range(0, len(body), step)]
    return [*(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces), b"0\r\n\r\n"]


@pytest.mark.parametrize("route", ["plain", "library"])
@pytest.mark.parametrize("step", [1, 7, 1000])
def test_a_stream_compressed_by_a_proxy_is_decompressed_chunk_by_chunk(step: int, route: str) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n"

    async def run() -> bytes:
        async with loopback(speak(head, *chunked(PACKED, step), close=True)) as server:
            if route == "plain":
                return await whole(await opened(server))
            transport = HttpTransport(Config(base_url="http://behind.it", proxy=server.url, api_key="tml-x"))
            try:
                return await whole(await transport.stream(ASKED))
            finally:
                await transport.close()

    assert asyncio.run(run()) == b"data: 1\n\n" * 50


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n" + PACKED[:-9],
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\nnot packed at all",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: br\r\n\r\nwords",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\nwords",
        b"HTTP/1.1 200 OK\r\nContent-Length: +5\r\n\r\nwords",
        HEAD + b"-5\r\nhello\r\n0\r\n\r\n",
        HEAD + b"\r\nhello\r\n0\r\n\r\n",
    ],
    ids=[
        "packed and cut",
        "said to be packed",
        "another packing",
        "negative",
        "signed",
        "negative chunk",
        "no size",
    ],
)
def test_a_reply_that_is_packed_wrongly_or_lies_about_its_size_is_a_connection_error(said: bytes) -> None:
    async def run() -> None:
        async with loopback(speak(said, close=True)) as server:
            with pytest.raises(APIConnectionError, match="no reply"):
                await whole(await opened(server))

    asyncio.run(run())


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"nonsense\r\n\r\n",
        HEAD[:20],
        HEAD + b"zz\r\n",
        HEAD + b"5\r\nhe",
        HEAD + b"5\r\nhello\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nwords",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\nwords",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n" + PACKED[:-9],
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\nnot packed at all",
    ],
    ids=[
        *("nothing", "no HTTP", "half a head", "no size", "half a chunk", "no end", "too short", "negative"),
        *("packed and cut", "said to be packed"),
    ],
)
def test_the_same_goes_for_replies_through_a_proxy(said: bytes) -> None:
    async def run() -> None:
        async with loopback(speak(said, close=True)) as server:
            transport = HttpTransport(Config(base_url="http://behind.it", proxy=server.url, api_key="tml-x"))
            try:
                with pytest.raises(APIConnectionError, match="no reply"):
                    await whole(await transport.stream(ASKED))
            finally:
                await transport.close()

    asyncio.run(run())


@pytest.mark.slow
def test_a_server_that_says_nothing_more_is_a_timeout() -> None:
    async def run() -> None:
        async with loopback(speak(HEAD + b"1\r\na\r\n")) as server:
            stream = await opened(server, Request("POST", "/x", timeout=1.0))  # also for the connection
            assert await stream.read() == b"a"
            with pytest.raises(APITimeoutError, match="sent nothing"):
                await stream.read()
            await stream.close()

    asyncio.run(run())


def test_a_server_that_is_not_there_is_a_connection_error() -> None:
    async def run() -> None:
        async with loopback(speak(b"")) as server:
            url = server.url
        with pytest.raises(APIConnectionError, match="refused"):
            await Http1Stream.open(url, ASKED)

    asyncio.run(run())


def test_closing_the_stream_ends_the_connection() -> None:
    async def run() -> None:
        gone = asyncio.Event()

        async def watch(_: Seen, writer: asyncio.StreamWriter) -> None:
            writer.write(HEAD + b"1\r\na\r\n")
            try:
                while True:
                    writer.write(b"1\r\nb\r\n")
                    await writer.drain()
                    await asyncio.sleep(0.001)
            except ConnectionError:
                gone.set()

        async with loopback(watch) as server:
            stream = await opened(server)
            await stream.read()
            await stream.close()
            await asyncio.wait_for(gone.wait(), 20)

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize("proxied", [False, True], ids=["plain", "library"])
def test_pool_size_bounds_the_streams_of_a_purpose(proxied: bool) -> None:
    """A stream over the limit waits until another one is closed, and fails when its timeout is over."""

    async def run() -> None:
        async with loopback(speak(HEAD, b"2\r\nok\r\n")) as server:
            proxy = server.url if proxied else None
            config = Config(base_url="http://behind.it" if proxied else server.url, proxy=proxy, pool_size=2)
            transport = HttpTransport(config)
            first, second = await transport.stream(ASKED), await transport.stream(ASKED)
            with pytest.raises(APITimeoutError):
                await transport.stream(replace(ASKED, timeout=0.2))
            other = await transport.stream(replace(ASKED, purpose="download"))
            waiting = asyncio.ensure_future(transport.stream(ASKED))
            await first.close()
            third = await asyncio.wait_for(waiting, 20)
            assert server.connections == 4
            for stream in (second, third, other):
                await stream.close()
            await transport.close()

    asyncio.run(run())


def test_a_stream_that_fails_to_open_releases_its_slot() -> None:
    async def run() -> None:
        async with loopback(speak(b"nonsense\r\n\r\n", close=True)) as server:
            transport = HttpTransport(Config(base_url=server.url, pool_size=1))
            for _ in range(3):
                with pytest.raises(APIConnectionError, match="no status line"):
                    await transport.stream(ASKED)

    asyncio.run(run())
