"""Gates the submission of samples: how many, how many bytes, and not while the server pushes back."""

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
MAX_SUBMISSIONS_UNDER_PRESSURE = 10
PRESSURE_LASTS_S = 10.0
BYTES_FACTOR_UNDER_PRESSURE = 20
LARGE_PROMPT_BYTES = 128 * 1024
SHORT_PAUSE_S, LONG_PAUSE_S = 1.0, 5.0


class Limiter:
    """Lets samples be submitted at the pace the server can take.

    After a push-back nobody submits until the pause is over, and for ten seconds more only a few at a time.
    """

    def __init__(self, max_bytes: int) -> None:
        self._bytes = ByteBudget(max_bytes)
        self._slots = Slots(MAX_SUBMISSIONS)
        self._few_slots = Slots(MAX_SUBMISSIONS_UNDER_PRESSURE)
        self._paused_until = float("-inf")

    async def admit(
        self,
        num_bytes: int,
        submission: Callable[[], Awaitable[T]],
        pause: Callable[[], Awaitable[None]] | None = None,
    ) -> T:
        """Runs a submission of a prompt of about this size, once that may be submitted.

        ``pause`` waits in place of :meth:`wait`, for callers whom something else may end meanwhile.
        """
        await self._slots.take(1)
        try:
            while not self._under_pressure:
                async with self._bytes.reserve(num_bytes):
                    if not self._under_pressure:  # the server may have pushed back while we waited in line
                        return await submission()
            async with self._few_slots, self._bytes.reserve(num_bytes * BYTES_FACTOR_UNDER_PRESSURE):
                await (pause or self.wait)()
                return await submission()
        finally:
            self._slots.give_back(1)

    def push_back(self, num_bytes: int, asked_s: float | None = None) -> float:
        """Notes that the server refused a prompt of this size for now; returns how long everybody pauses."""
        own = SHORT_PAUSE_S if num_bytes <= LARGE_PROMPT_BYTES else LONG_PAUSE_S
        pause = max(own, asked_s or 0.0)
        self._paused_until = max(self._paused_until, time.monotonic() + pause)
        return pause

    async def wait(self) -> None:
        """Waits while submissions are paused."""
        left = self._paused_until - time.monotonic()
        while left > 0:  # the pause may grow while we sleep through it
            await asyncio.sleep(left)
            left = self._paused_until - time.monotonic()

    @property
    def _under_pressure(self) -> bool:
        return time.monotonic() < self._paused_until + PRESSURE_LASTS_S


_shared: weakref.WeakValueDictionary[tuple[int, str, str | None, int], Limiter] = (
    weakref.WeakValueDictionary()
)


def limiter_for(caller: Caller, max_bytes: int) -> Limiter:
    """The limiter of a server and key: a push-back to one client of this process is a push-back to all.

    Transports other than HTTP lead to servers of their own and share nothing.
    """
    from tinkex._transport.shared import SharedHttp, server_of

    if not isinstance(caller.transport, SharedHttp):
        return Limiter(max_bytes)
    server = server_of(caller.config.base_url)
    place = (os.getpid(), server, caller.config.api_key, max_bytes)  # a forked child has a loop of its own
    limiter = _shared.get(place)
    if limiter is None:
        limiter = _shared[place] = Limiter(max_bytes)
    return limiter
