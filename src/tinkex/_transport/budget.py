"""Budgets: how many bytes, or how many calls, may be in flight simultaneously."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType

__all__ = ["ByteBudget", "Slots"]


class ByteBudget:
    """A semaphore that counts bytes, first come first served.

    A caller proceeds while the balance is not negative, so that something larger than the whole budget proceeds
    alone instead of never.
    """

    def __init__(self, limit: int) -> None:
        self._balance = limit
        self._waiters: deque[tuple[asyncio.Future[None], int]] = deque()

    @asynccontextmanager
    async def reserve(self, num_bytes: int) -> AsyncIterator[None]:
        """Holds ``num_bytes`` of the budget while the block runs; waits for them first."""
        await self.acquire(num_bytes)
        try:
            yield
        finally:
            self.release(num_bytes)

    async def acquire(self, num_bytes: int) -> None:
        """Waits for ``num_bytes`` and takes them; pair it with :meth:`release`."""
        if self._balance >= 0 and not self._waiters:
            self._balance -= num_bytes
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (waiter, num_bytes)
        self._waiters.append(entry)
        try:
            await waiter
        except asyncio.CancelledError:
            if not waiter.cancelled():  # it was granted at the moment of the cancellation
                self.release(num_bytes)
            elif entry in self._waiters:
                self._waiters.remove(entry)
            raise

    def release(self, num_bytes: int) -> None:
        """Returns bytes to the budget and wakes the waiters that fit now."""
        self._balance += num_bytes
        while self._waiters and self._balance >= 0:
            waiter, wanted = self._waiters.popleft()
            if not waiter.done():
                self._balance -= wanted
                waiter.set_result(None)


class Slots(ByteBudget):
    """A semaphore that admits ``limit`` calls, first come first served.

    Unlike that of ``asyncio.Semaphore`` its cost does not grow with the number of waiters.
    """

    def __init__(self, limit: int) -> None:
        super().__init__(limit - 1)  # a budget of bytes may be overdrawn once, a number of calls may not

    async def __aenter__(self) -> None:
        await self.acquire(1)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release(1)
