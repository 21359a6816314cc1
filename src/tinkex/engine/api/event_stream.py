"""Server-sent events: a response that ends when its client disconnects, and the tokens of a sample as they are sampled."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import TypeAlias

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tinkex._wire import proto as wire_proto
from tinkex.engine.engine import Engine
from tinkex.engine.running.feeds import StreamedToken, TokenFeed
from tinkex.engine.store import FutureStatus, Outcome
from tinkex.errors import ModelUnavailable, RequestErrorCategory, RequestFailedError, TinkexError
from tinkex.types import SampleResponse, UntypedAPIFuture

EVENT_STREAM = "text/event-stream"
KEEP_ALIVE_S = 5.0
"""Interval of keep-alive comments while a sample waits, so that proxies do not close the connection."""
KEEP_ALIVE = b": waiting\n\n"

SampleEvents: TypeAlias = AsyncGenerator["Sequence[StreamedToken] | SampleResponse", None]


class EventStream(Response):
    """A response whose events are generated while it is sent; the generator is closed if the client disconnects."""

    media_type = EVENT_STREAM

    def __init__(self, events: AsyncGenerator[bytes, None], headers: Mapping[str, str] | None = None) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until the last one, or until the client disconnects."""
        del scope  # unused
        disconnect = asyncio.create_task(_wait_for_disconnect(receive))
        stream = asyncio.create_task(self._stream(send))
        try:
            await asyncio.wait({disconnect, stream}, return_when=asyncio.FIRST_COMPLETED)
            if stream.done():
                with contextlib.suppress(OSError):  # the client disconnected in the middle of an event
                    stream.result()
        finally:
            for task in (disconnect, stream):
                task.cancel()
            await asyncio.gather(disconnect, stream, return_exceptions=True)

    async def _stream(self, send: Send) -> None:
        try:
            # Started before anything is sent: only a generator that has started is closed.
            block = await anext(self._events, b"")
            await send(
                {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            while block:
                await send({"type": "http.response.body", "body": block, "more_body": True})
                block = await anext(self._events, b"")
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self._events.aclose()


async def sample_events(engine: Engine, owner: str, accepted: UntypedAPIFuture) -> SampleEvents:
    """Yields the new tokens of an accepted sample in batches, and at last the whole response.

    The first batch is empty and immediate; an empty batch also comes after each ``KEEP_ALIVE_S`` without tokens. Raises
    ``RequestFailedError`` if the sample fails. Closing the generator early cancels the sample.
    """
    request_id = accepted.request_id
    feed = TokenFeed()
    outcome = asyncio.create_task(await_outcome(engine, owner, request_id))
    outcome.add_done_callback(lambda _: feed.notify())
    engine.watch(request_id, feed)
    try:
        yield ()
        while not outcome.done():
            try:
                async with asyncio.timeout(KEEP_ALIVE_S):
                    await feed.changed()
            except TimeoutError:
                yield ()
                continue
            tokens = list(feed.read())
            if tokens:
                yield tokens
        response = read_response(accepted, outcome.result())
        rest = [
            token
            for sample, sequence in enumerate(response.sequences)
            for token in feed.read_rest(sample, sequence)
        ]
        if rest:
            yield rest
        yield response
    finally:
        ended = outcome.done() and not outcome.cancelled() and outcome.exception() is None
        outcome.cancel()
        engine.unwatch(request_id)
        if not ended:
            cancel_sample(engine, owner, request_id)


async def await_outcome(engine: Engine, owner: str, request_id: str) -> Outcome:
    """Returns the outcome of a sample; raises ``TinkexError`` if it cannot be awaited."""
    timeout_s = engine.config.long_poll_s
    while True:
        started = time.monotonic()
        outcome = await engine.wait(owner, request_id, timeout_s)
        if outcome is not None:
            return outcome
        if time.monotonic() - started < timeout_s / 2:
            raise ModelUnavailable("the server is shutting down; retry when it is back.")


def read_response(accepted: UntypedAPIFuture, outcome: Outcome) -> SampleResponse:
    """Returns the response of a sample that has ended; raises ``RequestFailedError`` if it failed."""
    if outcome.status is not FutureStatus.DONE:
        category = RequestErrorCategory.parse(outcome.category)
        raise RequestFailedError(outcome.error, accepted.request_id, category)
    return wire_proto.decode_sample_response(outcome.result, accepted.sample_sequence_ids or [])


def cancel_sample(engine: Engine, owner: str, request_id: str) -> None:
    """Cancel a sample without a waiter; one that ended concurrently stays as it is."""
    with contextlib.suppress(TinkexError):
        engine.cancel(owner, request_id)


async def _wait_for_disconnect(receive: Receive) -> None:
    """Returns when the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass
