"""Byte budgets: how much may be on its way at once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

__all__ = ["ByteBudget"]


class ByteBudget:
    """Lets work through while its bytes fit, first come first served.

    Work proceeds while the balance is not negative, so a single piece larger than the whole budget goes
    alone instead of never.
    """

    def __init__(self, limit: int) -> None:
        self._balance = limit
        self._waiting: deque[asyncio.Future[None]] = deque()

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
        if self._balance < 0 or self._waiting:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn in self._waiting:
                    self._waiting.remove(turn)
                else:  # our turn had come at the moment we were cancelled: hand it on
                    self._wake()
                raise
        self._balance -= num_bytes
        self._wake()

    def give_back(self, num_bytes: int) -> None:
        """Returns bytes that were taken."""
        self._balance += num_bytes
        self._wake()

    def _wake(self) -> None:
        if self._waiting and self._balance >= 0:
            turn = self._waiting.popleft()
            if turn.done():
                self._wake()
            else:
                turn.set_result(None)
