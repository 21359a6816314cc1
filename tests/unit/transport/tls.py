"""A private certificate authority, and a server that speaks HTTP/2 over TLS on the loopback."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import ipaddress
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from hypercorn.asyncio import serve
from hypercorn.config import Config as HypercornConfig

from tests.scripted import ScriptedServer
from tinkex.testing import Reply, Request


@dataclass(frozen=True)
class Certificates:
    """Files in PEM: the authority's certificate, and a server's own."""

    authority: Path
    server: Path
    key: Path

    @property
    def options(self) -> tuple[str, ...]:
        """The options of ``tinkex serve``."""
        return ("--tls-cert", str(self.server), "--tls-key", str(self.key))

    def context(self, *protocols: str) -> ssl.SSLContext:
        """The settings of a server with this certificate that speaks these protocols (ALPN)."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.server, self.key)
        if protocols:
            context.set_alpn_protocols(list(protocols))
        return context


def certificates(
    directory: Path, host: str = "localhost", days_valid: tuple[int, int] = (-1, 1)
) -> Certificates:
    """Makes an authority, and a certificate for a host and for 127.0.0.1 that is valid between two days from now."""
    issuer_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    issuer = _name("Tinkex test authority")
    authority = (
        _certificate(issuer, issuer, issuer_key.public_key(), (-9, 9))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(issuer_key, hashes.SHA256())
    )
    names = x509.SubjectAlternativeName(
        [x509.DNSName(host), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    )
    server = (
        _certificate(_name(host), issuer, key.public_key(), days_valid)
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(issuer_key, hashes.SHA256())
    )
    files = Certificates(directory / "authority.pem", directory / "server.pem", directory / "key.pem")
    files.authority.write_bytes(authority.public_bytes(serialization.Encoding.PEM))
    files.server.write_bytes(server.public_bytes(serialization.Encoding.PEM))
    files.key.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return files


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: Any, days_valid: tuple[int, int]
) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + dt.timedelta(days=days_valid[0]))
        .not_valid_after(now + dt.timedelta(days=days_valid[1]))
    )


@dataclass
class SecureServer:
    """A scripted server behind TLS; ``versions`` and ``peers`` say how each request came."""

    scripted: ScriptedServer
    url: str = ""
    versions: list[str] = field(default_factory=list)
    peers: set[Any] = field(default_factory=set)
    headers: list[dict[str, str]] = field(default_factory=list)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            while True:
                event = (await receive())["type"]
                await send({"type": f"{event}.complete"})
                if event == "lifespan.shutdown":
                    return
        self.versions.append(scope["http_version"])
        self.peers.add(scope["client"])
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        self.headers.append(headers)
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        query = dict(parse_qsl(scope["query_string"].decode()))
        given = self.scripted.handle(Request(scope["method"], scope["path"], headers, body, query))
        answer = given if isinstance(given, Reply) else await given
        sent = [(name.encode(), value.encode()) for name, value in answer.headers.items()]
        await send({"type": "http.response.start", "status": answer.status, "headers": sent})
        await send({"type": "http.response.body", "body": answer.body})


@contextmanager
def secure(scripted: ScriptedServer, files: Certificates) -> Iterator[SecureServer]:
    """The scripted server over TLS, with HTTP/2 where the client takes it."""
    server = SecureServer(scripted)
    listening = socket.create_server(("127.0.0.1", 0))
    server.url = f"https://127.0.0.1:{listening.getsockname()[1]}"
    config = HypercornConfig()
    config.bind = [f"fd://{listening.detach()}"]
    config.certfile, config.keyfile = str(files.server), str(files.key)
    config.alpn_protocols = ["h2", "http/1.1"]
    config.errorlog = None
    config.graceful_timeout = 0

    async def run(stop: asyncio.Event) -> None:
        try:
            await serve(server, config, shutdown_trigger=stop.wait)
        except* ssl.SSLError:
            if not stop.is_set():  # at the end, data that crosses the goodbye on the wire is not a fault
                raise

    with in_background(run):
        yield server


class _TrackingLoop(asyncio.SelectorEventLoop):
    """Remembers the connections that its servers accepted, so that all of them can be closed at the end.

    Two of them would otherwise stay open: one whose task is cancelled before its first step, and one whose client
    does not answer the end of TLS, because asyncio ignores ``abort`` after two calls of ``close``.
    """

    def __init__(self) -> None:
        super().__init__()
        self._accepted: list[tuple[asyncio.Transport, socket.socket]] = []

    async def create_server(self, protocol_factory: Any, *args: Any, **options: Any) -> Any:
        def tracked() -> Any:
            protocol = protocol_factory()
            connection_made = protocol.connection_made

            def remember(transport: asyncio.Transport) -> None:
                self._accepted.append((transport, transport.get_extra_info("socket")))
                connection_made(transport)

            protocol.connection_made = remember
            return protocol

        return _Server(self, await super().create_server(tracked, *args, **options))

    def disconnect(self) -> bool:
        """Disconnects clients without waiting for them; returns whether all are gone."""
        self._accepted = [(each, connected) for each, connected in self._accepted if connected.fileno() >= 0]
        for transport, connected in self._accepted:
            transport.abort()
            with contextlib.suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)
        return not self._accepted


class _Server:
    """Closes when nothing is being accepted any more: asyncio leaves a connection open that it accepts meanwhile."""

    def __init__(self, loop: asyncio.AbstractEventLoop, server: asyncio.Server) -> None:
        self._loop, self._server = loop, server

    def close(self) -> None:
        for listening in self._server.sockets:
            self._loop.remove_reader(listening.fileno())

    async def wait_closed(self) -> None:
        for _ in range(3):
            await asyncio.sleep(0)
        self._server.close()
        await self._server.wait_closed()


@contextmanager
def in_background(run: Callable[[asyncio.Event], Awaitable[None]]) -> Iterator[None]:
    """Runs a server on an event loop of its own until the block ends; then its connections are closed."""
    started = threading.Event()
    handles: dict[str, Any] = {}

    async def main(loop: _TrackingLoop) -> None:
        handles["loop"], handles["stop"] = loop, (stop := asyncio.Event())
        started.set()
        serving = asyncio.ensure_future(run(stop))
        stopping = asyncio.ensure_future(stop.wait())
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        while not serving.done():
            loop.disconnect()
            await asyncio.sleep(0.001)
        while (others := asyncio.all_tasks() - {asyncio.current_task()}) or not loop.disconnect():
            for task in others:
                task.cancel()
            await asyncio.sleep(0.001)
        await serving

    def serve_until_stopped() -> None:
        with asyncio.Runner(loop_factory=_TrackingLoop) as runner:
            loop = runner.get_loop()
            assert isinstance(loop, _TrackingLoop)
            runner.run(main(loop))

    thread = threading.Thread(target=serve_until_stopped, daemon=True)
    thread.start()
    started.wait(10)
    try:
        yield
    finally:
        handles["loop"].call_soon_threadsafe(handles["stop"].set)
        thread.join(60)
        assert not thread.is_alive(), "the server does not stop"
