"""Backpressure: after a 429 all calls of the same purpose pause, not only the rejected one.

Samples have a limiter of their own, and polls a back-off of their own; this is for all other calls.
"""

from __future__ import annotations

import asyncio
import os
import time
import weakref
from typing import TYPE_CHECKING

from tinkex._transport.shared import SharedHttp, normalized_url

if TYPE_CHECKING:
    from tinkex._transport.base import Transport
    from tinkex._wire.endpoints import Purpose
    from tinkex.config import Config

__all__ = ["Pauses", "pauses_for"]


class Pauses:
    """Until when the calls of each purpose pause.

    >>> pauses = Pauses()
    >>> pauses.extend("train", 5.0)
    >>> pauses.remaining_s("train") > 4, pauses.remaining_s("rest")
    (True, 0.0)
    """

    def __init__(self) -> None:
        self._until: dict[Purpose, float] = {}

    def extend(self, purpose: Purpose, seconds: float) -> None:
        """Pauses the calls of a purpose for at least so many seconds from now."""
        self._until[purpose] = max(self._until.get(purpose, 0.0), time.monotonic() + seconds)

    def remaining_s(self, purpose: Purpose) -> float:
        """Seconds until the pause of a purpose ends."""
        until = self._until.get(purpose)
        return 0.0 if until is None else max(0.0, until - time.monotonic())

    async def wait(self, purpose: Purpose) -> None:
        """Waits until the pause of a purpose ends."""
        remaining_s = self.remaining_s(purpose)
        while remaining_s > 0:  # the pause may be extended meanwhile
            await asyncio.sleep(remaining_s)
            remaining_s = self.remaining_s(purpose)


_shared: weakref.WeakValueDictionary[object, Pauses] = weakref.WeakValueDictionary()


def pauses_for(transport: Transport, config: Config) -> Pauses:
    """The pauses of a server and key, shared by all clients of this process."""
    if not isinstance(transport, SharedHttp):
        return Pauses()
    key = (os.getpid(), normalized_url(config.base_url), config.api_key)
    found = _shared.get(key)
    if found is None:
        found = _shared[key] = Pauses()
    return found
