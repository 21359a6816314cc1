"""Limits the submission of samples: how many and how many bytes, with a pause after a 429."""

from __future__ import annotations

import asyncio
import os
import time
import weakref
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from tinkex._transport.budget import ByteBudget, Slots

if TYPE_CHECKING:
    from tinkex._transport.caller import Caller

__all__ = ["Limiter", "limiter_for"]

T = TypeVar("T")

MAX_SUBMISSIONS = 400
MAX_SUBMISSIONS_UNDER_BACKPRESSURE = 10
BACKPRESSURE_WINDOW_S = 10.0
"""How long after a pause the stricter limits hold."""
BYTES_FACTOR_UNDER_BACKPRESSURE = 20
LARGE_PROMPT_BYTES = 128 * 1024
SHORT_PAUSE_S, LONG_PAUSE_S = 1.0, 5.0


class Limiter:
    """Submits samples at the rate that the server accepts.

    After a 429 nothing is submitted until the pause is over, and then for ten seconds only a few simultaneously.
    """

    def __init__(self, max_bytes: int) -> None:
        self._bytes = ByteBudget(max_bytes)
        self._slots = Slots(MAX_SUBMISSIONS)
        self._few_slots = Slots(MAX_SUBMISSIONS_UNDER_BACKPRESSURE)
        self._paused_until = float("-inf")

    async def admit(
        self,
        num_bytes: int,
        submission: Callable[[], Awaitable[T]],
        pause: Callable[[], Awaitable[None]] | None = None,
    ) -> T:
        """Runs a submission of a prompt of about this size as soon as the limits allow it.

        ``pause`` replaces :meth:`wait`, for callers that can be closed while they wait.
        """
        await self._slots.acquire(1)
        try:
            while not self._under_backpressure:
                async with self._bytes.reserve(num_bytes):
                    if not self._under_backpressure:  # there may have been a 429 while this one waited
                        return await submission()
            async with self._few_slots, self._bytes.reserve(num_bytes * BYTES_FACTOR_UNDER_BACKPRESSURE):
                await (pause or self.wait)()
                return await submission()
        finally:
            self._slots.release(1)

    def report_backpressure(self, num_bytes: int, retry_after_s: float | None = None) -> float:
        """Records that the server rejected a prompt of this size with a 429; returns how long all submissions pause."""
        own = SHORT_PAUSE_S if num_bytes <= LARGE_PROMPT_BYTES else LONG_PAUSE_S
        pause = max(own, retry_after_s or 0.0)
        self._paused_until = max(self._paused_until, time.monotonic() + pause)
        return pause

    async def wait(self) -> None:
        """Waits while submissions are paused."""
        remaining_s = self._paused_until - time.monotonic()
        while remaining_s > 0:  # the pause may be extended meanwhile
            await asyncio.sleep(remaining_s)
            remaining_s = self._paused_until - time.monotonic()

    @property
    def _under_backpressure(self) -> bool:
        return time.monotonic() < self._paused_until + BACKPRESSURE_WINDOW_S


_shared: weakref.WeakValueDictionary[tuple[int, str, str | None, int], Limiter] = (
    weakref.WeakValueDictionary()
)


def limiter_for(caller: Caller, max_bytes: int) -> Limiter:
    """The limiter of a server and key, shared by all clients of this process.

    Transports other than HTTP have servers of their own and share nothing.
    """
    from tinkex._transport.shared import SharedHttp, normalized_url

    if not isinstance(caller.transport, SharedHttp):
        return Limiter(max_bytes)
    server = normalized_url(caller.config.base_url)
    key = (os.getpid(), server, caller.config.api_key, max_bytes)  # a forked child has a loop of its own
    limiter = _shared.get(key)
    if limiter is None:
        limiter = _shared[key] = Limiter(max_bytes)
    return limiter
