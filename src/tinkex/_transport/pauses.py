"""Calls that a server pushed back: all calls of their kind wait, not only the one that was told.

Samples have a limiter of their own, and polls their own pace; this is for everything else.
"""

from __future__ import annotations

import asyncio
import os
import time
import weakref
from typing import TYPE_CHECKING

from tinkex._transport.shared import SharedHttp, server_of

if TYPE_CHECKING:
    from tinkex._transport.base import Transport
    from tinkex._wire.endpoints import Purpose
    from tinkex.config import Config

__all__ = ["Pauses", "pauses_for"]


class Pauses:
    """Until when calls of each kind wait.

    >>> pauses = Pauses()
    >>> pauses.push_back("train", 5.0)
    >>> pauses.left("train") > 4, pauses.left("rest")
    (True, 0.0)
    """

    def __init__(self) -> None:
        self._until: dict[Purpose, float] = {}

    def push_back(self, purpose: Purpose, seconds: float) -> None:
        """Notes that the server wants no call of this kind for a while."""
        self._until[purpose] = max(self._until.get(purpose, 0.0), time.monotonic() + seconds)

    def left(self, purpose: Purpose) -> float:
        """Seconds until calls of this kind may go out."""
        until = self._until.get(purpose)
        return 0.0 if until is None else max(0.0, until - time.monotonic())

    async def wait(self, purpose: Purpose) -> None:
        """Waits until calls of this kind may go out."""
        left = self.left(purpose)
        while left > 0:  # it may grow while we sleep through it
            await asyncio.sleep(left)
            left = self.left(purpose)


_shared: weakref.WeakValueDictionary[object, Pauses] = weakref.WeakValueDictionary()


def pauses_for(transport: Transport, config: Config) -> Pauses:
    """Those of a server and key: what one client of this process is told, all know."""
    if not isinstance(transport, SharedHttp):
        return Pauses()
    place = (os.getpid(), server_of(config.base_url), config.api_key)
    found = _shared.get(place)
    if found is None:
        found = _shared[place] = Pauses()
    return found
