"""A small real HTTP server on the loopback, scripted connection by connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ssl


@dataclass(frozen=True)
class Seen:
    """A request as it came over the wire."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes


Speak = Callable[[Seen, asyncio.StreamWriter], Awaitable[None]]
"""Writes whatever the test wants to see on the wire; the connection stays open unless it closes it."""


@dataclass
class Loopback:
    url: str = ""
    seen: list[Seen] = field(default_factory=list)
    connections: int = 0
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    secured: list[ssl.SSLObject] = field(default_factory=list)
    """The TLS side of every connection, if there is one."""


@asynccontextmanager
async def loopback(*script: Speak, tls: ssl.SSLContext | None = None) -> AsyncIterator[Loopback]:
    """Serves one scripted answer per request, the last one for all further requests; over TLS with a context."""
    state = Loopback()
    writers: set[asyncio.StreamWriter] = set()

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        state.connections += 1
        if tls is not None:
            state.secured.append(writer.get_extra_info("ssl_object"))
        try:
            while (request := await read_request(reader)) is not None:
                state.seen.append(request)
                await script[min(len(state.seen), len(script)) - 1](request, writer)
                await writer.drain()
                if writer.is_closing():
                    return
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client went away, as some tests want it to
        finally:
            writer.close()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.add(writer)
        task = asyncio.ensure_future(converse(reader, writer))
        state.tasks.add(task)
        task.add_done_callback(state.tasks.discard)

    server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=tls)
    state.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield state
    finally:
        server.close()
        await asyncio.sleep(0)  # connections that were accepted at the last moment have a task then
        while tasks := list(state.tasks):
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for writer in writers:
            writer.transport.abort()  # a client that does not read would keep it open
        await asyncio.gather(*(writer.wait_closed() for writer in writers), return_exceptions=True)


async def read_request(reader: asyncio.StreamReader) -> Seen | None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.rstrip().split("\r\n")
    method, target, _ = first.split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Seen(method, target, headers, body)


def says(status: int = 200, body: bytes = b"{}", **headers: str) -> Speak:
    """An ordinary answer."""

    async def speak(_: Seen, writer: asyncio.StreamWriter) -> None:
        lines = [f"HTTP/1.1 {status} Whatever", f"Content-Length: {len(body)}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)

    return speak


async def hangs_up(_: Seen, writer: asyncio.StreamWriter) -> None:
    """Drops the connection before any answer."""
    writer.close()


async def breaks_off(_: Seen, writer: asyncio.StreamWriter) -> None:
    """Drops the connection in the middle of the body."""
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nhalf")
    await writer.drain()
    writer.close()


async def babbles(_: Seen, writer: asyncio.StreamWriter) -> None:
    """Answers with something that is not HTTP."""
    writer.write(b"220 mail ready\r\n\r\n")
    await writer.drain()
    writer.close()


async def sleeps(_: Seen, writer: asyncio.StreamWriter) -> None:
    """Never answers."""
    await asyncio.Event().wait()
