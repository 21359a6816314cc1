"""Requests over HTTP: chooses the transport that a configuration needs."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from tinkex._transport.base import Reply, Request
from tinkex._transport.http1_transport import Http1Transport, PoolSaturated
from tinkex._transport.streaming import ResponseStream
from tinkex._transport.tls import has_system_certificates
from tinkex.errors import APIConnectionError

if TYPE_CHECKING:
    from tinkex._transport.pyqwest_transport import PyqwestTransport
    from tinkex.config import Config

__all__ = ["HttpTransport"]


class HttpTransport:
    """Sends requests to a server's base URL.

    Every purpose (submitting, polling, heartbeats…) has a connection pool of its own, so that hundreds of pending
    polls never delay a heartbeat or a submission. Redirects are not followed: they would carry the API key to
    another host.

    Whole replies come over connections of our own where that is possible. The library carries the rest, by HTTP/2
    where the server supports it: streams over TLS, more pending requests than there should be TLS connections, and proxies
    other than the tunnels to ``https://`` servers.
    """

    def __init__(self, config: Config) -> None:
        self._base_url = config.base_url
        self._config = config
        self._own = Http1Transport(config) if _uses_own_connections(config) else None
        self._library: PyqwestTransport | None = None
        self._closed = False

    async def send(self, request: Request) -> Reply:
        """Sends one request; raises ``APIConnectionError`` if there is no complete reply."""
        if self._own is not None:
            try:
                return await self._own.send(request)
            except PoolSaturated:
                pass
        return await self._through_library(request).send(request)

    async def stream(self, request: Request) -> ResponseStream:
        """Sends one request and returns its response while that arrives."""
        if self._own is not None and self._base_url.startswith("http:"):
            return await self._own.stream(request)
        return await self._through_library(request).stream(request)

    async def close(self) -> None:
        """Closes every connection."""
        own, self._own = self._own, None
        library, self._library = self._library, None
        self._closed = True
        if own is not None:
            await own.close()
        if library is not None:
            await library.close()

    def _through_library(self, request: Request) -> PyqwestTransport:
        if self._closed:
            raise APIConnectionError(
                request.about(self._base_url), f"the connections to {self._base_url} are closed"
            )
        if self._library is None:
            from tinkex._transport.pyqwest_transport import PyqwestTransport

            self._library = PyqwestTransport(self._config)
        return self._library


def _uses_own_connections(config: Config) -> bool:
    scheme = urlsplit(config.base_url).scheme
    if config.proxy is None:
        proxied = _has_proxy(scheme)  # the library applies NO_PROXY
    else:
        proxied = scheme == "http" or urlsplit(config.proxy).scheme not in {"http", "https"}
    return not proxied and (scheme == "http" or has_system_certificates())


def _has_proxy(scheme: str) -> bool:
    """Whether the environment, or the settings of macOS or Windows, name a proxy for these URLs."""
    for name in (f"{scheme}_proxy", "all_proxy"):
        if os.environ.get(name) or os.environ.get(name.upper()):
            return True
    if scheme == "https" and sys.platform in {"darwin", "win32"}:
        from urllib.request import getproxies

        return bool(getproxies().get(scheme))
    return False
