"""One set of connections per server and key, whoever in this process talks to it."""

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
    from tinkex._transport.streaming import Stream
    from tinkex.config import Config

__all__ = ["SharedHttp", "server_of"]


class SharedHttp:
    """A client's share in the connections to a server; they close when the last share does.

    >>> from tinkex.config import Config
    >>> one, two = (SharedHttp(Config(base_url="http://host:1", api_key="tml-x")) for _ in range(2))
    >>> one.connections is two.connections
    True
    """

    def __init__(self, config: Config) -> None:
        self._base_url = config.base_url
        self._closed = False
        place = _place(config)
        with _lock:
            found = _open.get(place)
            if found is None:
                found = _open[place] = _Connections(HttpTransport(config))
            found.shares.add(self)
            self._held = found

    @property
    def connections(self) -> HttpTransport:
        """What all shares send over."""
        return self._held.transport

    async def send(self, request: Request) -> Reply:
        """Sends one request; a closed share sends nothing, whatever the others do."""
        if self._closed:
            about = request.about(self._base_url)
            raise APIConnectionError(about, f"the connections to {self._base_url} are closed")
        return await self._held.transport.send(request)

    async def stream(self, request: Request) -> Stream:
        """Sends one request whose reply is read while it arrives."""
        if self._closed:
            about = request.about(self._base_url)
            raise APIConnectionError(about, f"the connections to {self._base_url} are closed")
        return await self._held.transport.stream(request)

    async def close(self) -> None:
        """Gives the share back."""
        self._closed = True
        with _lock:
            self._held.shares.discard(self)
            last = not self._held.shares
            if last:
                for place in [place for place, held in _open.items() if held is self._held]:
                    del _open[place]
        if last:
            await self._held.transport.close()


class _Connections:
    """The connections and who has a share in them; a share that is forgotten counts no more."""

    def __init__(self, transport: HttpTransport) -> None:
        self.transport = transport
        self.shares: weakref.WeakSet[SharedHttp] = weakref.WeakSet()


_lock = threading.Lock()
_open: weakref.WeakValueDictionary[object, _Connections] = weakref.WeakValueDictionary()


def server_of(base_url: str) -> str:
    """A server's address in the one form in which it is compared with others.

    >>> server_of("HTTP://Host:80/prefix") == server_of("http://host/prefix")
    True
    """
    parts = urlsplit(base_url)
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme.lower())
    return f"{parts.scheme.lower()}://{(parts.hostname or '').lower()}:{port}{parts.path.rstrip('/')}"


def _place(config: Config) -> object:
    """Everything that makes connections different; a forked child starts its own."""
    return (
        os.getpid(),
        server_of(config.base_url),
        config.api_key,
        config.proxy,
        tuple(sorted(config.proxy_headers.items())),
        config.ca_file,
        config.pool_size,
    )
