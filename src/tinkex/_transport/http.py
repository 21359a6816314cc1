"""Requests over HTTP: one connection pool per purpose, system certificates, proxies that work."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlencode, urlsplit, urlunsplit

from tinkex._transport.base import Reply, Request
from tinkex._transport.plain import PlainHttp
from tinkex._transport.streaming import PlainStream
from tinkex.config.values import without_userinfo
from tinkex.errors import APIConnectionError, APITimeoutError, HttpRequest, SetupError

if TYPE_CHECKING:
    import pyqwest

    from tinkex._transport.streaming import Stream
    from tinkex._wire.endpoints import Purpose
    from tinkex.config import Config

__all__ = ["HttpTransport"]

CONNECT_TIMEOUT_S = 10.0
LONGEST_STREAM_S = 24 * 3600.0
IDLE_CONNECTIONS = 256
"""Kept open per pool: bursts of samples and polls would otherwise dial again and again."""


class HttpTransport:
    """Sends requests to a server's address.

    Every purpose (submitting, polling, heartbeats…) has a pool of its own, so that hundreds of polls that
    wait for results never delay a heartbeat or a submission. Redirects are not followed: they would carry
    the API key to another host.
    """

    def __init__(self, config: Config) -> None:
        self._base_url = config.base_url
        self._proxy = config.proxy
        self._proxy_headers = dict(config.proxy_headers)
        self._via = f" through the proxy {without_userinfo(config.proxy)}" if config.proxy else ""
        self._ca_file = config.ca_file
        self._pool_size = config.pool_size
        self._pools: dict[tuple[Purpose, float], tuple[pyqwest.HTTPTransport, pyqwest.Client]] = {}
        self._plain = (
            PlainHttp(config.base_url, pool_size=config.pool_size) if _goes_straight(config) else None
        )
        self._closed = False

    async def send(self, request: Request) -> Reply:
        """Sends one request; every failure to get a whole reply is an ``APIConnectionError``."""
        if self._closed:
            about = HttpRequest(request.method, self._base_url + request.path)
            raise APIConnectionError(about, f"the connections to {self._base_url} are closed")
        if self._plain is not None:
            return await self._plain.send(request)
        return await self._send_by_library(request)

    async def stream(self, request: Request) -> Stream:
        """Sends one request whose reply is read while it arrives."""
        if self._plain is not None:
            return await PlainStream.open(self._base_url, request)
        from tinkex._transport.library_stream import LibraryStream

        _check_same_process()
        # The library's timeout is for a whole reply, and a stream may be as long as it likes.
        client = self._client(request.purpose, LONGEST_STREAM_S)
        return await LibraryStream.open(client, self._base_url, request)

    async def close(self) -> None:
        """Closes every pool."""
        self._closed = True
        if self._plain is not None:
            await self._plain.close()
        pools, self._pools = self._pools, {}
        for transport, _ in pools.values():
            await transport.aclose()

    async def _send_by_library(self, request: Request) -> Reply:
        """TLS, HTTP/2 and proxies are the library's."""
        import pyqwest

        about = HttpRequest(request.method, self._base_url + request.path)
        _check_same_process()
        query = f"?{urlencode(request.query)}" if request.query else ""
        try:
            reply = await self._client(request.purpose, request.timeout).execute(
                request.method, about.url + query, request.headers, request.body or None
            )
        except TimeoutError as error:
            if isinstance(error, ConnectionError):  # pyqwest's ConnectTimeout is both
                message = f"no connection to {self._base_url}{self._via} in time"
                raise APITimeoutError(about, message) from error
            raise APITimeoutError(
                about, f"{self._base_url} did not answer {request.path} within {request.timeout:g} s"
            ) from error
        except (ConnectionError, pyqwest.RemoteProtocolError, pyqwest.ReadError, pyqwest.WriteError) as error:
            message = f"no answer from {self._base_url}{self._via}: {_cause(error)}"
            raise APIConnectionError(about, message) from error
        return Reply(
            reply.status, {name.lower(): value for name, value in reply.headers.items()}, reply.content
        )

    def _client(self, purpose: Purpose, timeout: float) -> pyqwest.Client:
        # The library's own timeout belongs to a pool and costs nothing per request. The calls of one purpose
        # have one or two different timeouts, so there are few pools.
        pool = self._pools.get((purpose, timeout))
        if pool is None:
            import pyqwest

            transport = pyqwest.HTTPTransport(
                tls_include_system_certs=self._base_url.startswith("https:")
                or (self._proxy or "").startswith("https:"),
                tls_ca_cert=None if self._ca_file is None else self._ca_file.read_bytes(),
                proxy=_proxy(self._proxy, self._proxy_headers) if self._proxy else None,
                timeout=timeout,
                connect_timeout=CONNECT_TIMEOUT_S,
                pool_max_idle_per_host=min(IDLE_CONNECTIONS, self._pool_size or IDLE_CONNECTIONS),
                max_connections_per_address=self._pool_size,
                use_system_dns=True,
                follow_redirects=False,
                enable_otel=False,
            )
            pool = self._pools[purpose, timeout] = (transport, pyqwest.Client(transport))
        return pool[1]


def _goes_straight(config: Config) -> bool:
    """Whether requests need neither TLS nor a proxy, not even one that the environment names."""
    named = any(os.environ.get(name) for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"))
    return config.base_url.startswith("http://") and config.proxy is None and not named


def _proxy(url: str, headers: Mapping[str, str]) -> pyqwest.Proxy:
    """The proxy with its headers; authorization among them stands for the user and password in its address."""
    import pyqwest

    if any(name.lower() == "proxy-authorization" for name in headers):
        parts = urlsplit(url)
        url = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    return pyqwest.Proxy(url, headers=headers)


def _cause(error: Exception) -> str:
    """The last, most concrete part of the library's chain of messages."""
    cause = str(error).rpartition(": ")[2]
    if cause == "UnknownIssuer":
        return (
            "its certificate comes from an authority that this machine does not know; "
            "if you do, give the authority's certificate as ca_file=… or in SSL_CERT_FILE"
        )
    return cause


_http_process: int | None = None


def _check_same_process() -> None:
    """The HTTP library's own threads do not survive a fork: say so instead of hanging."""
    global _http_process  # noqa: PLW0603 - a fact about the process
    process = os.getpid()
    if _http_process is None:
        _http_process = process
    elif _http_process != process:
        raise SetupError(
            "this process was forked from one that had already used a client over HTTP; start worker "
            "processes with multiprocessing.get_context('spawn'), or fork before the first call"
        )
