"""Cancels abandoned samples on the server, a batch at a time."""

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
_CANCEL = endpoint("cancel_future")


class Cancellations:
    """The samples of one session to be cancelled; used on the background loop only.

    At most one batch of requests is in flight, so that a program that abandons thousands of samples does not
    flood the server.
    """

    def __init__(self, caller: Caller, limits: Callable[[], types.ClientDynamicConfigResponse]) -> None:
        self._caller = caller
        self._limits = limits
        self._pending: deque[str] = deque()
        self._draining: asyncio.Task[None] | None = None

    def add(self, request_id: str) -> None:
        """Cancels one sample on the server, if that supports it."""
        if not self._limits().sample_cancel_enabled:
            return
        self._pending.append(request_id)
        if self._draining is None or self._draining.done():
            self._draining = create_detached_task(self._drain())

    async def _drain(self) -> None:
        while self._pending:
            size = max(self._limits().sample_cancel_max_batch_size, 1)
            batch = [self._pending.popleft() for _ in range(min(size, len(self._pending)))]
            await asyncio.gather(*(self._cancel(request_id) for request_id in batch))

    async def _cancel(self, request_id: str) -> None:
        try:
            await self._caller.call(
                _CANCEL, types.CancelFutureRequest(request_id=request_id), timeout=TIMEOUT_S
            )
        except TinkexError as error:
            # The server deletes results that are not retrieved anyway, and the caller is gone.
            self._caller.sink.emit(RetryScheduled(_CANCEL.name, 0, 0.0, str(error)))
