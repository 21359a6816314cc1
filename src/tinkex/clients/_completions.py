"""One poll for all samples of a sampler, where the server offers it: which of them have finished."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from tinkex import types
from tinkex._runtime import create_detached_task
from tinkex._transport.caller import error_of, is_proxy_error
from tinkex._transport.retry import PAYMENT_PAUSE_S, is_transient
from tinkex._wire import json
from tinkex._wire.endpoints import endpoint
from tinkex.errors import APIConnectionError, APIResponseValidationError, ClosedError, TinkexError
from tinkex.observability.events import RetryScheduled

if TYPE_CHECKING:
    from tinkex._transport.base import Reply
    from tinkex._transport.caller import Caller

__all__ = ["Completions"]

POLL_TIMEOUT_S = 45.0
PAUSE_S = 1.0
ASK_EVERY_S = 20.0
"""While no sample finishes, the server is asked this often why."""
MAX_REFUSALS = 3
MOST_UNCLAIMED = 100_000
_ROW = endpoint("retrieve_futures")


class Completions:
    """Tells samples when they have finished; asks the server only while somebody waits."""

    def __init__(
        self,
        caller: Caller,
        target: Callable[[], types.SamplingSessionFuturesTarget],
        ask: Callable[[str], Coroutine[Any, Any, None]],
        *,
        ask_every_s: float = ASK_EVERY_S,
    ) -> None:
        self._caller = caller
        self._target = target
        self._ask = ask
        """Finds out how one sample is treated that waits: polls for all samples do not tell it."""
        self._ask_every_s = ask_every_s
        self._quiet_since = 0.0
        self._asking: asyncio.Task[None] | None = None
        self._waiting: dict[str, asyncio.Future[int]] = {}
        self._unclaimed: dict[str, int] = {}
        """Finished before the answer to their submission was here."""
        self._retrieved: list[str] = []
        self._cursor = 0
        self._poller: asyncio.Task[None] | None = None

    async def wait(self, request_id: str) -> int:
        """Waits until a sample has finished or failed; the size of its result, 0 if unknown."""
        if request_id in self._unclaimed:
            return self._unclaimed.pop(request_id)
        finished: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = finished
        if self._poller is None or self._poller.done():
            self._poller = create_detached_task(self._poll())
        try:
            return await finished
        finally:
            self._waiting.pop(request_id, None)

    def retrieved(self, request_id: str) -> None:
        """Notes that the server may forget a result; it is told with the next poll."""
        self._retrieved.append(request_id)

    async def _poll(self) -> None:
        refusals = 0
        self._quiet_since = time.monotonic()
        while self._waiting:
            told = self._retrieved.copy()
            request = types.FuturesRetrieveRequest(
                target=self._target(), prev_cursor=self._cursor, retrieved_request_ids=told
            )
            try:
                reply = await self._caller.attempt(_ROW, request, timeout=POLL_TIMEOUT_S)
                news = self._read(reply)
            except APIConnectionError as error:
                await self._pause(PAUSE_S, error.message)
            except (ClosedError, APIResponseValidationError) as error:
                self._fail(error)
                return
            else:
                if news is not None:
                    del self._retrieved[: len(told)]
                    refusals = 0
                    self._take(news)
                    self._find_out(finished=bool(news.completions))
                    continue
                if reply.status == 408:
                    self._find_out(finished=False)
                refusals += reply.status == 400
                pause = _pause_after(reply, refusals)
                if pause is None:
                    self._fail(error_of(reply, self._caller.about(_ROW)))
                    return
                await self._pause(pause, f"status {reply.status}")

    def _read(self, reply: Reply) -> types.FuturesRetrieveResponse | None:
        if reply.status != 200:
            return None
        try:
            return json.decode(reply.body, types.FuturesRetrieveResponse)
        except json.Malformed as error:
            message = f"the answer to retrieve_futures does not follow the protocol: {error}"
            raise APIResponseValidationError(None, None, message) from error

    def _take(self, news: types.FuturesRetrieveResponse) -> None:
        self._cursor = news.cursor
        for completion in news.completions:
            size = getattr(completion, "response_payload_uncompressed_size", None) or 0
            waiting = self._waiting.get(completion.request_id)
            if waiting is not None and not waiting.done():
                waiting.set_result(size)
            elif waiting is None and len(self._unclaimed) < MOST_UNCLAIMED:
                self._unclaimed[completion.request_id] = size

    def _find_out(self, *, finished: bool) -> None:
        """Has the oldest sample asked after, where nothing finishes: those behind it wait for the same reason."""
        now = time.monotonic()
        idle = self._asking is None or self._asking.done()
        if finished:
            self._quiet_since = now
        elif self._waiting and idle and now - self._quiet_since >= self._ask_every_s:
            self._quiet_since = now
            self._asking = create_detached_task(self._ask_after(next(iter(self._waiting))))

    async def _ask_after(self, request_id: str) -> None:
        with contextlib.suppress(TinkexError):  # the poll for all samples says what is wrong with the server
            await self._ask(request_id)

    async def _pause(self, seconds: float, reason: str) -> None:
        self._caller.sink.emit(RetryScheduled(_ROW.name, 0, seconds, reason))
        await asyncio.sleep(seconds)

    def _fail(self, error: TinkexError) -> None:
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(error)


def _pause_after(reply: Reply, refusals: int) -> float | None:
    """How long to wait before asking again; None: never again."""
    if reply.status == 402:
        return PAYMENT_PAUSE_S
    if (
        is_proxy_error(reply)
        or is_transient(reply.status)
        or (reply.status == 400 and refusals <= MAX_REFUSALS)
    ):
        return PAUSE_S
    return None
