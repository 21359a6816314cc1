"""Requests over HTTP: chooses the transport that a configuration needs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Protocol

from tinkex._transport.base import Reply, Request, Transport
from tinkex._transport.http1_transport import Http1Transport
from tinkex._transport.streaming import ResponseStream, StreamingTransport
from tinkex.errors import APIConnectionError

if TYPE_CHECKING:
    from tinkex.config import Config

__all__ = ["HttpTransport"]

PROXY_VARIABLES = ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")


class _FullTransport(Transport, StreamingTransport, Protocol):
    """Both interfaces."""


class HttpTransport:
    """Sends requests to a server's base URL.

    Every purpose (submitting, polling, heartbeats…) has a connection pool of its own, so that hundreds of pending
    polls never delay a heartbeat or a submission. Redirects are not followed: they would carry the API key to
    another host.
    """

    def __init__(self, config: Config) -> None:
        self._base_url = config.base_url
        self._config = config
        self._transport: _FullTransport | None = None
        if _is_direct(config):
            self._transport = Http1Transport(config.base_url, pool_size=config.pool_size)
        self._closed = False

    async def send(self, request: Request) -> Reply:
        """Sends one request; raises ``APIConnectionError`` if there is no complete reply."""
        return await (self._transport or self._library(request)).send(request)

    async def stream(self, request: Request) -> ResponseStream:
        """Sends one request and returns its response while that arrives."""
        return await (self._transport or self._library(request)).stream(request)

    async def close(self) -> None:
        """Closes every connection."""
        transport, self._transport = self._transport, None
        self._closed = True
        if transport is not None:
            await transport.close()

    def _library(self, request: Request) -> _FullTransport:
        if self._closed:
            raise APIConnectionError(
                request.about(self._base_url), f"the connections to {self._base_url} are closed"
            )
        from tinkex._transport.pyqwest_transport import PyqwestTransport

        self._transport = PyqwestTransport(self._config)
        return self._transport


def _is_direct(config: Config) -> bool:
    """Whether requests need neither TLS nor a proxy, be it one that the environment names."""
    named = any(os.environ.get(name) for name in PROXY_VARIABLES)
    return config.base_url.startswith("http://") and config.proxy is None and not named
