"""A private certificate authority, and a server that speaks HTTP/2 over TLS on the loopback."""

from __future__ import annotations

import asyncio
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


@contextmanager
def in_background(run: Callable[[asyncio.Event], Awaitable[None]]) -> Iterator[None]:
    """Runs a server on an event loop of its own until the block ends."""
    started = threading.Event()
    handles: dict[str, Any] = {}

    async def main() -> None:
        handles["loop"], handles["stop"] = asyncio.get_running_loop(), asyncio.Event()
        started.set()
        await run(handles["stop"])
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    started.wait(10)
    try:
        yield
    finally:
        handles["loop"].call_soon_threadsafe(handles["stop"].set)
        thread.join(10)
