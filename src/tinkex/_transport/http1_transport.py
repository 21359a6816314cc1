"""HTTP/1.1 over the client's own connections, on its own event loop.

With a server on the same machine or network the client's own work is most of the cost of a request. So this transport
uses no other thread, and opens no more connections than the server can keep busy.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import weakref
from collections import deque
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from tinkex._runtime import before_stop, create_detached_task
from tinkex._transport.base import Reply, Request
from tinkex._transport.budget import Slots
from tinkex._transport.connection import Connection, ConnectionLost, DeadlineExceeded
from tinkex._transport.dialer import Dialer
from tinkex._transport.http1 import ReplyTooLarge, accepted_encodings, reply_too_large, request_head
from tinkex._transport.http1_stream import Http1Stream
from tinkex.errors import APIConnectionError, APITimeoutError

if TYPE_CHECKING:
    from tinkex._wire.endpoints import Purpose
    from tinkex.config import Config

__all__ = ["Http1Transport", "PoolSaturated"]

CONNECT_TIMEOUT_S = 10.0
MAX_IDLE_CONNECTIONS = 256
INITIAL_CONNECTIONS = 16
GROWTH_INTERVAL_S = 0.002
"""While requests wait, and fewer connections than there are became free within this time, their number doubles."""
TLS_GROWTH_INTERVAL_S = 0.02
"""The same over TLS, where opening a connection costs as much as several requests."""
MAX_TLS_CONNECTIONS = 64
"""Per pool without a size. HTTP/2 needs fewer connections for more pending requests: see :class:`PoolSaturated`."""
SATURATION_INTERVAL_S = 0.1
SATURATION_S = 1.0
"""How long a saturated pool rejects requests that find no free connection."""


class PoolSaturated(Exception):
    """All connections over TLS are in use for longer than a moment: requests that wait go another way."""


class Http1Transport:
    """Sends requests to the base URL of a configuration; each purpose has a connection pool of its own.

    ``pool_size`` bounds the connections of each pool, and the streams of each purpose.
    """

    def __init__(self, config: Config) -> None:
        parts = urlsplit(config.base_url)
        self._base_url = config.base_url
        self._dialer = Dialer(config)
        self._pool_size = config.pool_size
        self._prefix = parts.path
        self._common = f"host: {parts.netloc}\r\naccept-encoding: {accepted_encodings()}\r\n"
        self._reset()

    async def send(self, request: Request) -> Reply:
        """Sends one request; raises ``APIConnectionError`` if there is no complete reply, or :class:`PoolSaturated`."""
        if self._process != os.getpid():  # a forked child leaves the connections to its parent
            self._reset()
        pool = self._pools.get(request.purpose)
        if pool is None or pool.closed:  # closed with its event loop, which was stopped
            pool = self._pools[request.purpose] = _Pool(self._dialer, self._pool_size)
        deadline = pool.loop.time() + request.timeout
        pool.watch(deadline)
        connection = None
        try:
            connection = pool.idle.pop() if pool.idle else await pool.acquire(deadline)
            return await connection.exchange(request.method, self._head(request), request.body, deadline)
        except asyncio.CancelledError:
            if connection is not None:
                connection.abort()
            raise
        except DeadlineExceeded as error:
            raise APITimeoutError(
                request.about(self._base_url),
                f"{self._base_url} did not reply to {request.shown_path or request.path} within {request.timeout:g} s",
            ) from error
        except TimeoutError as error:
            raise self._no_connection(request) from error
        except ReplyTooLarge as error:
            raise reply_too_large(request.about(self._base_url), error) from error
        except OSError as error:
            cause = "connection refused" if isinstance(error, ConnectionRefusedError) else str(error)
            raise APIConnectionError(
                request.about(self._base_url), f"no reply from {self._base_url}{self._dialer.via}: {cause}"
            ) from error

    async def stream(self, request: Request) -> Http1Stream:
        """Sends one request over a connection of its own and returns its response while that arrives."""
        if self._pool_size is None:
            return await Http1Stream.open(self._base_url, request)
        if self._process != os.getpid():
            self._reset()
        slots = self._stream_slots.setdefault(request.purpose, Slots(self._pool_size))
        try:
            async with asyncio.timeout(request.timeout):
                await slots.acquire(1)
        except TimeoutError as error:
            raise self._no_connection(request) from error
        try:
            return await Http1Stream.open(self._base_url, request, lambda: slots.release(1))
        except BaseException:
            slots.release(1)
            raise

    async def close(self) -> None:
        """Closes every connection; pending replies fail."""
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()

    def _reset(self) -> None:
        self._process = os.getpid()
        self._pools: dict[Purpose, _Pool] = {}
        self._stream_slots: dict[Purpose, Slots] = {}
        weakref.finalize(self, _close_later, self._pools).atexit = False

    def _head(self, request: Request) -> bytes:
        length = f"content-length: {len(request.body)}\r\n" if request.body or request.method != "GET" else ""
        return request_head(request, self._prefix, self._common, length)

    def _no_connection(self, request: Request) -> APITimeoutError:
        return APITimeoutError(
            request.about(self._base_url),
            f"no connection to {self._base_url}{self._dialer.via} within "
            f"{min(request.timeout, CONNECT_TIMEOUT_S):g} s",
        )


class _Pool:
    """The connections of one purpose: reused last in first out, more are opened while requests wait."""

    def __init__(self, dialer: Dialer, size: int | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        self.closed = False
        self._dialer = dialer
        self._may_saturate = size is None and dialer.secure
        self._size = MAX_TLS_CONNECTIONS if self._may_saturate else size
        self._saturated_until = 0.0
        self._growth_interval_s = TLS_GROWTH_INTERVAL_S if dialer.secure else GROWTH_INTERVAL_S
        self.idle: list[Connection] = []
        self._waiters: deque[tuple[asyncio.Future[Connection], float]] = deque()
        self._open: set[Connection] = set()
        self._connecting: set[asyncio.Task[None]] = set()
        self._growth_timer: asyncio.TimerHandle | None = None
        self._num_freed = 0
        self._deadline_timer: asyncio.TimerHandle | None = None
        _pools.add(self)
        if not _registered:
            _registered.append(True)
            before_stop(_close_all)

    async def acquire(self, deadline: float) -> Connection:
        """Waits for a free connection; raises :class:`DeadlineExceeded` if the deadline passes first."""
        full = self._full
        if full and self.loop.time() < self._saturated_until:
            raise PoolSaturated
        waiter: asyncio.Future[Connection] = self.loop.create_future()
        self._waiters.append((waiter, deadline))
        if full and not self._may_saturate:
            pass  # one of the open connections becomes free
        elif len(self._open) + len(self._connecting) < INITIAL_CONNECTIONS:
            self._start_connecting()
        elif self._growth_timer is None:
            self._schedule_growth()
        try:
            return await waiter
        except asyncio.CancelledError:
            if not waiter.cancelled() and waiter.exception() is None:
                self.free(waiter.result())  # it was assigned at the moment of the cancellation
            raise

    def watch(self, deadline: float) -> None:
        """Makes requests fail at their deadlines; one timer serves all, because few ever fire."""
        if self._deadline_timer is None or deadline < self._deadline_timer.when():
            if self._deadline_timer is not None:
                self._deadline_timer.cancel()
            self._deadline_timer = self.loop.call_at(deadline, self._expire)

    def _expire(self) -> None:
        self._deadline_timer = None
        now = self.loop.time()
        for waiter, deadline in self._waiters:
            if not waiter.done():
                if deadline <= now:
                    waiter.set_exception(DeadlineExceeded())
                else:
                    self.watch(deadline)
        for connection in list(self._open):
            if connection.deadline <= now:
                connection.abort(DeadlineExceeded())
            elif connection.busy:
                self.watch(connection.deadline)

    def free(self, connection: Connection) -> None:
        """Assigns a connection to the next waiter, or keeps it idle."""
        self._num_freed += 1
        if not connection.alive:
            return
        while self._waiters:
            waiter, _ = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(connection)
                return
        if len(self.idle) >= MAX_IDLE_CONNECTIONS:
            connection.abort()
        else:
            self.idle.append(connection)

    def close(self) -> None:
        self.closed = True
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
        for connecting in self._connecting:
            connecting.cancel()
        for connection in list(self._open):
            connection.abort()
        self._fail_all(ConnectionLost("the connections are closed"))

    def _grow(self) -> None:
        self._growth_timer = None
        while self._waiters and self._waiters[0][0].done():
            self._waiters.popleft()
        if not self._waiters:
            return
        if self._num_freed < len(self._open):
            if self._full and self._may_saturate:
                self._saturated_until = self.loop.time() + SATURATION_S
                self._fail_all(PoolSaturated(), keep=len(self._connecting))
            wanted = min(len(self._waiters), max(INITIAL_CONNECTIONS, len(self._open))) - len(
                self._connecting
            )
            for _ in range(wanted):
                if not self._full:
                    self._start_connecting()
        self._schedule_growth()

    def _schedule_growth(self) -> None:
        self._num_freed = 0
        saturates = self._full and self._may_saturate
        interval_s = SATURATION_INTERVAL_S if saturates else self._growth_interval_s
        self._growth_timer = self.loop.call_later(interval_s, self._grow)

    @property
    def _full(self) -> bool:
        return self._size is not None and len(self._open) + len(self._connecting) >= self._size

    def _start_connecting(self) -> None:
        connecting = create_detached_task(
            self._connect()
        )  # a connection outlives the call that needed it first
        self._connecting.add(connecting)
        connecting.add_done_callback(self._connecting.discard)

    async def _connect(self) -> None:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                connection = await self._dialer.connect(self._new_connection)
        except OSError as error:
            # Without any connection all waiters fail. With some they wait for those: the likely reason is that
            # this process may not open more files.
            if not self._open:
                self._fail_all(error)
            return
        self._open.add(connection)
        if connection.alive:
            self.free(connection)

    def _new_connection(self) -> Connection:
        return Connection(self.free, self._on_lost)

    def _on_lost(self, connection: Connection) -> None:
        self._open.discard(connection)
        with contextlib.suppress(ValueError):
            self.idle.remove(connection)
        if self._waiters and not self._open and not self._connecting and not self.loop.is_closed():
            self._start_connecting()

    def _fail_all(self, error: Exception, *, keep: int = 0) -> None:
        """Makes all waiters fail but the first ``keep``."""
        waiters = list(self._waiters)
        self._waiters = deque(waiters[:keep])
        for waiter, _ in waiters[keep:]:
            if not waiter.done():
                waiter.set_exception(error)


_pools: weakref.WeakSet[_Pool] = weakref.WeakSet()
_registered: list[bool] = []


def _close_all() -> None:
    """Closes the connections of clients that were never closed; runs on the loop that is about to stop."""
    loop = asyncio.get_running_loop()
    for pool in list(_pools):
        if pool.loop is loop:
            pool.close()


def _close_later(pools: dict[Purpose, _Pool]) -> None:
    """Closes the connections of a client that was garbage collected, from whatever thread."""
    for pool in pools.values():
        with contextlib.suppress(RuntimeError):  # the loop is closed, and the connections with it
            pool.loop.call_soon_threadsafe(pool.close)
