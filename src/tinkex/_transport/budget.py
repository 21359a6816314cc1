"""Budgets: how many bytes, or how many calls, may be on their way at once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType

__all__ = ["ByteBudget", "Slots"]


class ByteBudget:
    """Lets work through while its bytes fit, first come first served.

    Work proceeds while the balance is not negative, so a single piece larger than the whole budget goes
    alone instead of never.
    """

    def __init__(self, limit: int) -> None:
        self._balance = limit
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()

    @asynccontextmanager
    async def reserve(self, num_bytes: int) -> AsyncIterator[None]:
        """Holds ``num_bytes`` of the budget while the block runs, after waiting for room."""
        await self.take(num_bytes)
        try:
            yield
        finally:
            self.give_back(num_bytes)

    async def take(self, num_bytes: int) -> None:
        """Waits for room and takes ``num_bytes``; pair it with :meth:`give_back`."""
        if self._balance >= 0 and not self._waiting:
            self._balance -= num_bytes
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        place = (turn, num_bytes)
        self._waiting.append(place)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # the turn had come at the moment of the cancellation
                self.give_back(num_bytes)
            elif place in self._waiting:
                self._waiting.remove(place)
            raise

    def give_back(self, num_bytes: int) -> None:
        """Returns bytes that were taken, and lets in those who fit now."""
        self._balance += num_bytes
        while self._waiting and self._balance >= 0:
            turn, wanted = self._waiting.popleft()
            if not turn.done():
                self._balance -= wanted
                turn.set_result(None)


class Slots(ByteBudget):
    """Lets at most ``limit`` calls through at once, first come first served.

    Unlike ``asyncio.Semaphore`` its cost does not grow with the number of those who wait.
    """

    def __init__(self, limit: int) -> None:
        super().__init__(limit - 1)  # a budget of bytes may overshoot by one piece, a number of calls may not

    async def __aenter__(self) -> None:
        await self.take(1)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.give_back(1)
