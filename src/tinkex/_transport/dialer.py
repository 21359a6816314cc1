"""Opens connections to a server: directly or through the tunnel of a proxy, with or without TLS."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ssl
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from tinkex._transport.connection import Connection, ConnectionLost, ConnectionRejected
from tinkex._transport.http1 import parse_head
from tinkex._transport.tls import TlsContext, client_context, explain
from tinkex.config.values import without_userinfo

if TYPE_CHECKING:
    from tinkex.config import Config

__all__ = ["Dialer"]

MAX_HEAD_BYTES = 64 * 1024
DEFAULT_PORTS = {"http": 80, "https": 443}


class Dialer:
    """Opens connections to the host of a configuration's base URL.

    ``https://`` servers are reached over TLS, and through the HTTP or HTTPS proxy of the configuration by CONNECT.
    """

    def __init__(self, config: Config) -> None:
        parts = urlsplit(config.base_url)
        assert parts.hostname is not None
        self.secure = parts.scheme == "https"
        self.via = f" through the proxy {without_userinfo(config.proxy)}" if config.proxy else ""
        """How errors name the proxy."""
        self._host, self._port = parts.hostname, parts.port or DEFAULT_PORTS[parts.scheme]
        self._ca_file = config.ca_file
        self._context: TlsContext | None = None
        self._tunnel = None
        if config.proxy is not None:
            self._tunnel = _Tunnel(config.proxy, config.proxy_headers, self._host, self._port, config.ca_file)

    async def connect(self, new_connection: Callable[[], Connection]) -> Connection:
        """Opens one connection; raises ``ConnectionRejected`` where another attempt would fail in the same way."""
        loop = asyncio.get_running_loop()
        if self.secure and self._context is None:
            self._context = client_context(self._ca_file)
        through = await self._tunnel.open() if self._tunnel is not None else None
        with _explained(f"{self._host}:{self._port}", secure=self.secure):
            if through is None:
                _, connection = await loop.create_connection(
                    new_connection,
                    self._host,
                    self._port,
                    ssl=self._context,
                    server_hostname=self._host if self.secure else None,
                )
                return connection
            connection = new_connection()
            assert self._context is not None
            try:
                transport = await loop.start_tls(
                    through, connection, self._context, server_hostname=self._host
                )
                if transport is None:
                    raise ConnectionResetError
            except BaseException:
                through.abort()
                raise
        connection.connection_made(transport)
        return connection


class _Tunnel:
    """Connections through an HTTP or HTTPS proxy to one host."""

    def __init__(
        self, proxy: str, headers: Mapping[str, str], host: str, port: int, ca_file: Path | None
    ) -> None:
        parts = urlsplit(proxy)
        assert parts.hostname is not None
        self._host, self._port = parts.hostname, parts.port or DEFAULT_PORTS[parts.scheme]
        self._secure, self._ca_file = parts.scheme == "https", ca_file
        self._context: TlsContext | None = None
        self._target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        sent = {"host": self._target}
        if parts.username is not None:
            login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            sent["proxy-authorization"] = f"Basic {base64.b64encode(login.encode()).decode()}"
        sent |= {name.lower(): value for name, value in headers.items()}
        lines = "".join(f"{name}: {value}\r\n" for name, value in sent.items())
        self._head = f"CONNECT {self._target} HTTP/1.1\r\n{lines}\r\n".encode("latin-1")

    async def open(self) -> asyncio.Transport:
        """Connects to the proxy and lets it connect to the host."""
        loop = asyncio.get_running_loop()
        if self._secure and self._context is None:
            self._context = client_context(self._ca_file)
        reply: asyncio.Future[bytes] = loop.create_future()
        with _explained(f"{self._host}:{self._port}", secure=self._secure):
            transport, _ = await loop.create_connection(
                lambda: _TunnelReply(reply),
                self._host,
                self._port,
                ssl=self._context,
                server_hostname=self._host if self._secure else None,
            )
        try:
            transport.write(self._head)
            self._check(await reply)
        except BaseException:
            transport.abort()
            raise
        return transport

    def _check(self, head: bytes) -> None:
        try:
            status = parse_head(head.decode("latin-1"), "CONNECT").status
        except ValueError as error:
            raise ConnectionLost(f"the reply of the proxy to CONNECT is not HTTP: {error}") from error
        if 200 <= status < 300:
            return
        refused = f"the proxy refused CONNECT to {self._target} with status {status}"
        if status == 407:
            raise ConnectionRejected(
                f"{refused}. Give it a user and a password, as proxy=http://user:password@host:port, or a "
                "proxy-authorization in proxy_headers"
            )
        if status >= 500 or status in {408, 429}:
            raise ConnectionError(refused)
        raise ConnectionRejected(
            f"{refused}. Ask its operator to allow this host and port, or use another proxy"
        )


class _TunnelReply(asyncio.Protocol):
    """Reads the head of the reply to a CONNECT; nothing follows it before the client's own TLS handshake."""

    def __init__(self, reply: asyncio.Future[bytes]) -> None:
        self._reply = reply
        self._buffer = bytearray()

    def data_received(self, data: bytes) -> None:
        """Called by asyncio with bytes of the reply."""
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        if end >= 0:
            self._end(bytes(self._buffer[:end]))
        elif len(self._buffer) > MAX_HEAD_BYTES:
            self._end(ConnectionLost("the headers of the proxy's reply do not end"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio when the proxy closed the connection."""
        cause = f": {exc}" if exc else ""
        self._end(ConnectionLost(f"the proxy closed the connection before it replied to CONNECT{cause}"))

    def _end(self, outcome: bytes | Exception) -> None:
        if self._reply.done():
            return
        if isinstance(outcome, bytes):
            self._reply.set_result(outcome)
        else:
            self._reply.set_exception(outcome)


@contextlib.contextmanager
def _explained(address: str, *, secure: bool) -> Iterator[None]:
    """Makes the errors of connecting to an address say what to do."""
    try:
        yield
    except ssl.SSLCertVerificationError as error:
        raise ConnectionRejected(explain(error, address)) from error
    except ssl.SSLError as error:
        raise ConnectionError(explain(error, address)) from error
    except (ConnectionResetError, ConnectionAbortedError) as error:
        if secure and not str(error):  # asyncio says nothing more
            raise ConnectionError(f"{address} closed the connection during the TLS handshake") from error
        raise
    except ValueError as error:  # UnicodeError, too
        raise OSError(f"{address.rpartition(':')[0]!r} is not a valid host name: {error}") from error
