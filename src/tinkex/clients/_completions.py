"""One long poll for all samples of a sampler, where the server supports it: which of them have finished."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from tinkex import types
from tinkex._runtime import create_detached_task
from tinkex._transport.caller import error_of, is_proxy_error
from tinkex._transport.polling import MIN_LONG_POLL_S, fast_reply_pause_s
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
RETRY_S = 1.0
QUEUE_POLL_INTERVAL_S = 20.0
"""How often the queue state is polled while no sample finishes."""
MAX_BAD_REQUESTS = 3
MAX_UNCLAIMED = 100_000
_RETRIEVE = endpoint("retrieve_futures")


class Completions:
    """Notifies samples that have finished; polls only while there are waiters."""

    def __init__(
        self,
        caller: Caller,
        target: Callable[[], types.SamplingSessionFuturesTarget],
        poll_queue: Callable[[str], Coroutine[Any, Any, None]],
        *,
        queue_poll_interval_s: float = QUEUE_POLL_INTERVAL_S,
    ) -> None:
        self._caller = caller
        self._target = target
        self._poll_queue = poll_queue
        """Polls the queue state of one pending sample, which polls for all samples do not return."""
        self._queue_poll_interval_s = queue_poll_interval_s
        self._last_progress = 0.0
        self._polling_queue: asyncio.Task[None] | None = None
        self._waiters: dict[str, asyncio.Future[int]] = {}
        self._unclaimed: dict[str, int] = {}
        """Finished before the reply to their submission was here; request id → size of the result."""
        self._retrieved: list[str] = []
        self._cursor = 0
        self._poller: asyncio.Task[None] | None = None

    async def wait(self, request_id: str) -> int:
        """Waits until a sample has finished or failed; returns the size of its result, 0 if unknown."""
        if request_id in self._unclaimed:
            return self._unclaimed.pop(request_id)
        finished: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiters[request_id] = finished
        if self._poller is None or self._poller.done():
            self._poller = create_detached_task(self._poll())
        try:
            return await finished
        finally:
            self._waiters.pop(request_id, None)

    def retrieved(self, request_id: str) -> None:
        """Records that the server may delete a result; the next poll reports it."""
        self._unclaimed.pop(request_id, None)
        self._retrieved.append(request_id)

    async def _poll(self) -> None:
        bad_requests = fast_replies = 0
        self._last_progress = time.monotonic()
        while self._waiters:
            began = time.monotonic()
            reported = self._retrieved.copy()
            request = types.FuturesRetrieveRequest(
                target=self._target(), prev_cursor=self._cursor, retrieved_request_ids=reported
            )
            try:
                reply = await self._caller.attempt(_RETRIEVE, request, timeout=POLL_TIMEOUT_S)
                response = self._read(reply)
            except APIConnectionError as error:
                await self._pause(RETRY_S, error.message)
            except (ClosedError, APIResponseValidationError) as error:
                self._fail(error)
                return
            else:
                if response is not None:
                    del self._retrieved[: len(reported)]
                    bad_requests = 0
                    finished = self._take(response)
                    self._watch_queue(finished=finished)
                    if finished or time.monotonic() - began >= MIN_LONG_POLL_S:
                        fast_replies = 0
                    else:  # not a long poll: without a pause the client would spin
                        await asyncio.sleep(
                            fast_reply_pause_s(fast_replies, self._caller.config.poll_backoff)
                        )
                        fast_replies += 1
                    continue
                if reply.status == 408:
                    self._watch_queue(finished=False)
                    if time.monotonic() - began >= MIN_LONG_POLL_S:
                        continue  # the usual end of a long poll
                bad_requests += reply.status == 400
                pause = _pause_after(reply, bad_requests)
                if pause is None:
                    self._fail(error_of(reply, self._caller.about(_RETRIEVE)))
                    return
                await self._pause(pause, f"status {reply.status}")

    def _read(self, reply: Reply) -> types.FuturesRetrieveResponse | None:
        if reply.status != 200:
            return None
        try:
            return json.decode(reply.body, types.FuturesRetrieveResponse)
        except json.Malformed as error:
            message = f"the reply to retrieve_futures does not follow the protocol: {error}"
            raise APIResponseValidationError(None, None, message) from error

    def _take(self, response: types.FuturesRetrieveResponse) -> bool:
        """Notifies the waiters of a reply; returns whether it has news."""
        self._cursor = response.cursor
        news = False
        for completion in response.completions:
            size = getattr(completion, "response_payload_uncompressed_size", None) or 0
            waiter = self._waiters.get(completion.request_id)
            if waiter is not None and not waiter.done():
                waiter.set_result(size)
                news = True
            elif waiter is None and len(self._unclaimed) < MAX_UNCLAIMED:
                news = news or completion.request_id not in self._unclaimed
                self._unclaimed[completion.request_id] = size
        return news

    def _watch_queue(self, *, finished: bool) -> None:
        """Polls the queue state of the oldest sample while nothing finishes: the others wait for the same reason."""
        now = time.monotonic()
        idle = self._polling_queue is None or self._polling_queue.done()
        if finished:
            self._last_progress = now
        elif self._waiters and idle and now - self._last_progress >= self._queue_poll_interval_s:
            self._last_progress = now
            self._polling_queue = create_detached_task(self._poll_queue_of(next(iter(self._waiters))))

    async def _poll_queue_of(self, request_id: str) -> None:
        with contextlib.suppress(
            TinkexError
        ):  # the poll for all samples raises what is wrong with the server
            await self._poll_queue(request_id)

    async def _pause(self, seconds: float, reason: str) -> None:
        self._caller.sink.emit(RetryScheduled(_RETRIEVE.name, 0, seconds, reason))
        await asyncio.sleep(seconds)

    def _fail(self, error: TinkexError) -> None:
        for waiter in self._waiters.values():
            if not waiter.done():
                waiter.set_exception(error)


def _pause_after(reply: Reply, bad_requests: int) -> float | None:
    """How long to wait before the next poll; None: polling has failed."""
    if reply.status == 402:
        return PAYMENT_PAUSE_S
    if (
        is_proxy_error(reply)
        or is_transient(reply.status)
        or (reply.status == 400 and bad_requests <= MAX_BAD_REQUESTS)
    ):
        return RETRY_S
    return None
