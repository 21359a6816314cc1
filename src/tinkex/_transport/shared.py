"""One set of connections per server and key, shared by all clients of this process."""

from __future__ import annotations

import os
import threading
import weakref
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from tinkex._transport.http import HttpTransport
from tinkex.errors import APIConnectionError

if TYPE_CHECKING:
    from tinkex._transport.base import Reply, Request
    from tinkex._transport.streaming import ResponseStream
    from tinkex.config import Config

__all__ = ["SharedHttp", "normalized_url"]


class SharedHttp:
    """A client's reference to the connections to a server; they are closed with the last reference.

    >>> from tinkex.config import Config
    >>> one, two = (SharedHttp(Config(base_url="http://host:1", api_key="tml-x")) for _ in range(2))
    >>> one.connections is two.connections
    True
    """

    def __init__(self, config: Config) -> None:
        self._base_url = config.base_url
        self._closed = False
        key = _key(config)
        with _lock:
            found = _open.get(key)
            if found is None:
                found = _open[key] = _Connections(HttpTransport(config))
            found.references.add(self)
            self._connections = found

    @property
    def connections(self) -> HttpTransport:
        """The transport that all references share."""
        return self._connections.transport

    async def send(self, request: Request) -> Reply:
        """Sends one request; raises ``APIConnectionError`` once this reference is closed."""
        if self._closed:
            raise self._closed_error(request)
        return await self._connections.transport.send(request)

    async def stream(self, request: Request) -> ResponseStream:
        """Sends one request and returns its response while that arrives."""
        if self._closed:
            raise self._closed_error(request)
        return await self._connections.transport.stream(request)

    async def close(self) -> None:
        """Drops the reference."""
        self._closed = True
        with _lock:
            self._connections.references.discard(self)
            last = not self._connections.references
            if last:
                for key in [key for key, value in _open.items() if value is self._connections]:
                    del _open[key]
        if last:
            await self._connections.transport.close()

    def _closed_error(self, request: Request) -> APIConnectionError:
        about = request.about(self._base_url)
        return APIConnectionError(about, f"the connections to {self._base_url} are closed")


class _Connections:
    """The connections and the references to them; a reference that was garbage collected does not count."""

    def __init__(self, transport: HttpTransport) -> None:
        self.transport = transport
        self.references: weakref.WeakSet[SharedHttp] = weakref.WeakSet()


_lock = threading.Lock()
_open: weakref.WeakValueDictionary[object, _Connections] = weakref.WeakValueDictionary()


def normalized_url(base_url: str) -> str:
    """A base URL in its canonical form, for comparison with others.

    >>> normalized_url("HTTP://Host:80/prefix") == normalized_url("http://host/prefix")
    True
    """
    parts = urlsplit(base_url)
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme.lower())
    return f"{parts.scheme.lower()}://{(parts.hostname or '').lower()}:{port}{parts.path.rstrip('/')}"


def _key(config: Config) -> object:
    """Everything that distinguishes connections; a forked child opens its own."""
    return (
        os.getpid(),
        normalized_url(config.base_url),
        config.api_key,
        config.proxy,
        tuple(sorted(config.proxy_headers.items())),
        config.ca_file,
        config.pool_size,
    )
