"""HTTP without TLS and without a proxy, on the client's own event loop.

Servers on the same machine or in the same network are where the client's own work is most of the cost, so
the road to them is short: no other thread, and as few connections as the server's pace needs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import weakref
from collections import deque
from typing import TYPE_CHECKING
from urllib.parse import urlencode, urlsplit

from tinkex._runtime import before_stop, create_detached_task
from tinkex._transport.base import Reply, Request
from tinkex._transport.connection import Broken, Connection, Late, accepted_encodings
from tinkex.errors import APIConnectionError, APITimeoutError, HttpRequest

if TYPE_CHECKING:
    from tinkex._wire.endpoints import Purpose

__all__ = ["PlainHttp"]

CONNECT_TIMEOUT_S = 10.0
IDLE_CONNECTIONS = 256
FIRST_CONNECTIONS = 16
PATIENCE_S = 0.002
"""While requests wait, and within this time not every connection came free, their number doubles."""


class PlainHttp:
    """Sends requests to an ``http://`` address; each purpose has connections of its own."""

    def __init__(self, base_url: str, *, pool_size: int | None = None) -> None:
        parts = urlsplit(base_url)
        assert parts.hostname is not None
        self._base_url = base_url
        self._address = (parts.hostname, parts.port or 80)
        self._pool_size = pool_size
        self._prefix = parts.path
        self._common = f" HTTP/1.1\r\nhost: {parts.netloc}\r\naccept-encoding: {accepted_encodings()}\r\n"
        self._start_afresh()

    async def send(self, request: Request) -> Reply:
        """Sends one request; every failure to get a whole reply is an ``APIConnectionError``."""
        if self._process != os.getpid():  # a forked child leaves the connections to its parent
            self._start_afresh()
        pool = self._pools.get(request.purpose)
        if pool is None:
            pool = self._pools[request.purpose] = _Pool(*self._address, self._pool_size)
        deadline = pool.loop.time() + request.timeout
        pool.watch(deadline)
        connection = None
        try:
            connection = pool.idle.pop() if pool.idle else await pool.turn(deadline)
            return await connection.exchange(request.method, self._head(request), request.body, deadline)
        except asyncio.CancelledError:
            if connection is not None:
                connection.abandon()
            raise
        except Late as error:
            raise APITimeoutError(
                self._about(request),
                f"{self._base_url} did not answer {request.path} within {request.timeout:g} s",
            ) from error
        except TimeoutError as error:
            raise APITimeoutError(
                self._about(request), f"no connection to {self._base_url} in time"
            ) from error
        except OSError as error:
            cause = "connection refused" if isinstance(error, ConnectionRefusedError) else str(error)
            raise APIConnectionError(
                self._about(request), f"no answer from {self._base_url}: {cause}"
            ) from error

    async def close(self) -> None:
        """Closes every connection; replies still under way fail."""
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()

    def _start_afresh(self) -> None:
        self._process = os.getpid()
        self._pools: dict[Purpose, _Pool] = {}
        weakref.finalize(self, _close_later, self._pools).atexit = False

    def _head(self, request: Request) -> bytes:
        query = f"?{urlencode(request.query)}" if request.query else ""
        lines = "".join([f"{name}: {value}\r\n" for name, value in request.headers.items()])
        length = f"content-length: {len(request.body)}\r\n" if request.body or request.method != "GET" else ""
        head = f"{request.method} {self._prefix}{request.path}{query}{self._common}{lines}{length}\r\n"
        return head.encode("latin-1")

    def _about(self, request: Request) -> HttpRequest:
        return HttpRequest(request.method, self._base_url + request.path)


class _Pool:
    """The connections of one purpose: reused last in first out, more are made while requests wait."""

    def __init__(self, host: str, port: int, size: int | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        self._size = size
        self.idle: list[Connection] = []
        self._host, self._port = host, port
        self._waiting: deque[tuple[asyncio.Future[Connection], float]] = deque()
        self._open: set[Connection] = set()
        self._dials: set[asyncio.Task[None]] = set()
        self._growing: asyncio.TimerHandle | None = None
        self._freed = 0
        self._watch: asyncio.TimerHandle | None = None
        _pools.add(self)
        if not _hooked:
            _hooked.append(True)
            before_stop(_close_all)

    async def turn(self, deadline: float) -> Connection:
        """Waits in line for a connection; :class:`Late` when the deadline passes meanwhile."""
        turn: asyncio.Future[Connection] = self.loop.create_future()
        self._waiting.append((turn, deadline))
        if self._full:
            pass  # a connection that is there will come free
        elif len(self._open) + len(self._dials) < FIRST_CONNECTIONS:
            self._dial()
        elif self._growing is None:
            self._freed = 0
            self._growing = self.loop.call_later(PATIENCE_S, self._grow)
        try:
            return await turn
        except asyncio.CancelledError:
            if not turn.cancelled() and turn.exception() is None:
                self.free(turn.result())  # it came at the moment of the cancellation
            raise

    def watch(self, deadline: float) -> None:
        """Sees to it that requests end at their deadlines; one timer serves all, for few ever fire."""
        if self._watch is None or deadline < self._watch.when():
            if self._watch is not None:
                self._watch.cancel()
            self._watch = self.loop.call_at(deadline, self._expire)

    def _expire(self) -> None:
        self._watch = None
        now = self.loop.time()
        for turn, deadline in self._waiting:
            if not turn.done():
                if deadline <= now:
                    turn.set_exception(Late())
                else:
                    self.watch(deadline)
        for connection in list(self._open):
            if connection.deadline <= now:
                connection.abandon(Late())
            elif connection.busy:
                self.watch(connection.deadline)

    def free(self, connection: Connection) -> None:
        """Hands a connection to the next in line, or keeps it for later."""
        self._freed += 1
        if not connection.alive:
            return
        while self._waiting:
            turn, _ = self._waiting.popleft()
            if not turn.done():
                turn.set_result(connection)
                return
        if len(self.idle) >= IDLE_CONNECTIONS:
            connection.abandon()
        else:
            self.idle.append(connection)

    def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        for dial in self._dials:
            dial.cancel()
        for connection in list(self._open):
            connection.abandon()
        self._fail_all(Broken("the connections are closed"))

    def _grow(self) -> None:
        self._growing = None
        while self._waiting and self._waiting[0][0].done():
            self._waiting.popleft()
        if not self._waiting:
            return
        if self._freed < len(self._open):
            wanted = min(len(self._waiting), max(FIRST_CONNECTIONS, len(self._open))) - len(self._dials)
            for _ in range(wanted):
                if not self._full:
                    self._dial()
        self._freed = 0
        self._growing = self.loop.call_later(PATIENCE_S, self._grow)

    @property
    def _full(self) -> bool:
        return self._size is not None and len(self._open) + len(self._dials) >= self._size

    def _dial(self) -> None:
        dial = create_detached_task(self._connect())  # a connection outlives the call that needed it first
        self._dials.add(dial)
        dial.add_done_callback(self._dials.discard)

    async def _connect(self) -> None:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await self.loop.create_connection(self._made, self._host, self._port)
        except (OSError, UnicodeError) as error:
            # Without any connection nobody in line can hope for one. With some, those in line wait for
            # them: the likely reason is that this process may not open more files.
            if not self._open:
                name = f"{self._host!r} cannot be the name of a host"
                self._fail_all(OSError(name) if isinstance(error, UnicodeError) else error)
            return
        self._open.add(connection)
        if connection.alive:
            self.free(connection)

    def _made(self) -> Connection:
        return Connection(self.free, self._lost)

    def _lost(self, connection: Connection) -> None:
        self._open.discard(connection)
        with contextlib.suppress(ValueError):
            self.idle.remove(connection)
        if self._waiting and not self._open and not self._dials and not self.loop.is_closed():
            self._dial()

    def _fail_all(self, error: Exception) -> None:
        waiting, self._waiting = self._waiting, deque()
        for turn, _ in waiting:
            if not turn.done():
                turn.set_exception(error)


_pools: weakref.WeakSet[_Pool] = weakref.WeakSet()
_hooked: list[bool] = []


def _close_all() -> None:
    """Closes what clients that were never closed leave behind; runs on the loop that is about to stop."""
    loop = asyncio.get_running_loop()
    for pool in list(_pools):
        if pool.loop is loop:
            pool.close()


def _close_later(pools: dict[Purpose, _Pool]) -> None:
    """Closes the connections of a client that nobody holds any more, from whatever thread noticed it."""
    for pool in pools.values():
        with contextlib.suppress(RuntimeError):  # the loop is gone, and the connections with it
            pool.loop.call_soon_threadsafe(pool.close)
