"""Proxies on the loopback that record what clients send them: HTTP, HTTPS and SOCKS5."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from tests.unit.transport.tls import Certificates, in_background

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class HttpProxy:
    """``heads`` are the request lines and headers that clients sent."""

    url: str = ""
    heads: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    outgoing: set[tuple[str, int]] = field(default_factory=set)
    """The local addresses of its connections to servers."""

    @property
    def tunnels(self) -> list[dict[str, str]]:
        """The headers of every CONNECT."""
        return [headers for first, headers in self.heads if first.startswith("CONNECT ")]


@contextmanager
def http_proxy(files: Certificates | None = None, refusals: Sequence[int] = ()) -> Iterator[HttpProxy]:
    """A proxy that tunnels a CONNECT and forwards a request by its absolute URL; over TLS with ``files``.

    It replies to its first requests with the statuses in ``refusals``.
    """
    proxy = HttpProxy()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.rstrip().split("\r\n")
        headers = {n.lower(): v.strip() for n, _, v in (line.partition(":") for line in lines)}
        proxy.heads.append((first, headers))
        if len(proxy.heads) <= len(refusals):
            status = refusals[len(proxy.heads) - 1]
            writer.write(f"HTTP/1.1 {status} Refused\r\ncontent-length: 0\r\n\r\n".encode())
            return
        method, target, _ = first.split(" ")
        parts = urlsplit(f"//{target}" if method == "CONNECT" else target)
        server_reader, server_writer = await asyncio.open_connection(parts.hostname, parts.port)
        proxy.outgoing.add(server_writer.get_extra_info("sockname"))
        if method == "CONNECT":
            writer.write(b"HTTP/1.1 200 Connected\r\n\r\n")
        else:
            own = ("proxy-", "connection:", "x-route:")  # meant for the proxy
            kept = [line for line in lines if not line.lower().startswith(own)]
            path = parts.path + (f"?{parts.query}" if parts.query else "")
            lines = [f"{method} {path} HTTP/1.1", "connection: close", *kept, "", ""]
            server_writer.write("\r\n".join(lines).encode("latin-1"))
        await _tunnel(reader, writer, server_reader, server_writer)

    with _listening(serve, files) as port:
        proxy.url = f"{'http' if files is None else 'https'}://127.0.0.1:{port}"
        yield proxy


@dataclass
class SocksProxy:
    """``logins`` are the users and passwords that clients sent (None: no authentication), ``targets`` where they went."""

    port: int = 0
    logins: list[tuple[str, str] | None] = field(default_factory=list)
    targets: list[tuple[str, int]] = field(default_factory=list)
    """Host and port; a host name means that the proxy resolves it."""
    outgoing: set[tuple[str, int]] = field(default_factory=set)
    """The local addresses of its connections to servers."""


@contextmanager
def socks5_proxy(password: str | None = None) -> Iterator[SocksProxy]:
    """A SOCKS5 proxy (RFC 1928, 1929); with a password it accepts nobody without it."""
    proxy = SocksProxy()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _, num_methods = await reader.readexactly(2)
        methods = await reader.readexactly(num_methods)
        if 2 in methods:
            writer.write(b"\x05\x02")
            await reader.readexactly(1)
            user, word = (await _counted(reader)).decode(), (await _counted(reader)).decode()
            proxy.logins.append((user, word))
            accepted = password is None or word == password
            writer.write(b"\x01\x00" if accepted else b"\x01\x01")
            if not accepted:
                return
        elif password is not None:
            writer.write(b"\x05\xff")
            return
        else:
            proxy.logins.append(None)
            writer.write(b"\x05\x00")
        _, _, _, kind = await reader.readexactly(4)
        host = (
            socket.inet_ntoa(await reader.readexactly(4)) if kind == 1 else (await _counted(reader)).decode()
        )
        port = int.from_bytes(await reader.readexactly(2), "big")
        proxy.targets.append((host, port))
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", port)
        proxy.outgoing.add(server_writer.get_extra_info("sockname"))
        writer.write(b"\x05\x00\x00\x01\x00\x00\x00\x00\x00\x00")
        await _tunnel(reader, writer, server_reader, server_writer)

    with _listening(serve, None) as port:
        proxy.port = port
        yield proxy


async def _counted(reader: asyncio.StreamReader) -> bytes:
    (length,) = await reader.readexactly(1)
    return await reader.readexactly(length)


async def _tunnel(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    server_reader: asyncio.StreamReader,
    server_writer: asyncio.StreamWriter,
) -> None:
    try:
        await asyncio.gather(_pour(reader, server_writer), _pour(server_reader, writer))
    finally:
        server_writer.transport.abort()


async def _pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()


@contextmanager
def _listening(serve: Serve, files: Certificates | None) -> Iterator[int]:
    listening = socket.create_server(("127.0.0.1", 0))
    context: ssl.SSLContext | None = None
    if files is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(files.server, files.key)
    tasks: set[asyncio.Task[None]] = set()

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass  # one of the two sides disconnected
        finally:
            writer.close()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(converse(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        task.add_done_callback(lambda _: writer.transport.abort() if stopping.is_set() else None)

    stopping = threading.Event()

    async def run(stop: asyncio.Event) -> None:
        server = await asyncio.start_server(accept, sock=listening, ssl=context)
        await stop.wait()
        stopping.set()
        server.close()
        await server.wait_closed()
        for task in (open_ones := list(tasks)):
            task.cancel()
        await asyncio.gather(*open_ones, return_exceptions=True)
        for _ in range(3):  # aborted sockets are closed in the next rounds of the loop
            await asyncio.sleep(0)

    with in_background(run):
        yield listening.getsockname()[1]
