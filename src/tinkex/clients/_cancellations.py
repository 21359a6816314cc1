"""Tells the server which samples nobody waits for any more, a batch at a time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from tinkex import types
from tinkex._runtime import create_detached_task
from tinkex._wire.endpoints import endpoint
from tinkex.errors import TinkexError
from tinkex.observability.events import RetryScheduled

if TYPE_CHECKING:
    from tinkex._transport.caller import Caller

__all__ = ["Cancellations"]

TIMEOUT_S = 30.0
_ROW = endpoint("cancel_future")


class Cancellations:
    """The samples to be cancelled of one session; used on the background loop only.

    At most a batch is on its way at once, so that a program that drops thousands of samples does not
    flood the server that it wants to spare.
    """

    def __init__(self, caller: Caller, limits: Callable[[], types.ClientDynamicConfigResponse]) -> None:
        self._caller = caller
        self._limits = limits
        self._pending: deque[str] = deque()
        self._draining: asyncio.Task[None] | None = None

    def add(self, request_id: str) -> None:
        """Has the server told about one sample, if it wants to know."""
        if not self._limits().sample_cancel_enabled:
            return
        self._pending.append(request_id)
        if self._draining is None or self._draining.done():
            self._draining = create_detached_task(self._drain())

    async def _drain(self) -> None:
        while self._pending:
            size = max(self._limits().sample_cancel_max_batch_size, 1)
            batch = [self._pending.popleft() for _ in range(min(size, len(self._pending)))]
            await asyncio.gather(*(self._tell(request_id) for request_id in batch))

    async def _tell(self, request_id: str) -> None:
        try:
            await self._caller.call(_ROW, types.CancelFutureRequest(request_id=request_id), timeout=TIMEOUT_S)
        except TinkexError as error:
            # The server drops results that nobody fetches by itself; nobody is left to be told.
            self._caller.sink.emit(RetryScheduled(_ROW.name, 0, 0.0, str(error)))
