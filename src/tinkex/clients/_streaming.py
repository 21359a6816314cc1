"""Streamed samples: the events of one sample, and its wrappers for plain and for asynchronous code."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

from tinkex import types
from tinkex._runtime import await_future, background
from tinkex._transport.caller import EVENT_STREAM
from tinkex._wire import json
from tinkex._wire.endpoints import endpoint
from tinkex._wire.sse import EventParser, ServerSentEvent
from tinkex.clients._checks import check_offered, check_sample
from tinkex.clients._chunking import prompt_bytes
from tinkex.clients._pacing import submit_paced
from tinkex.clients._sample_body import sample_body
from tinkex.clients._spans import sampling_span
from tinkex.errors import (
    APIConnectionError,
    APIResponseValidationError,
    APIStatusError,
    ClosedError,
    RequestErrorCategory,
    RequestFailedError,
    StreamInterruptedError,
    TinkexError,
)
from tinkex.observability.events import StreamingUnavailable
from tinkex.observability.tracing import OperationSpan, use_operation

if TYPE_CHECKING:
    from tinkex._transport.budget import Slots
    from tinkex._transport.call_stream import CallStream
    from tinkex.clients._retries import Retries
    from tinkex.clients.session import OpenSession, Session

__all__ = ["AsyncSampleStream", "SampleStream", "StreamContext", "StreamSource"]

_STREAM = endpoint("stream_sample")
NO_SUCH_ENDPOINT = frozenset({404, 405, 501})
BACKPRESSURE = {"x-tinker-sampling-backpressure": "1"}


@dataclass(frozen=True)
class StreamContext:
    """What a stream needs from its client."""

    session: Session
    opened: OpenSession
    in_flight: Slots
    next_seq_id: Callable[[], Awaitable[int]]
    sample: Callable[[types.SampleRequest], Awaitable[types.SampleResponse]]
    """Runs the same sample without streaming."""
    retries: Retries


class StreamSource:
    """The events of one sample; used on the background loop only.

    Until the first token a failure is retried like that of any sample. After that it is an error,
    because tokens were already returned.
    """

    def __init__(
        self, context: StreamContext, request: types.SampleRequest, operation: OperationSpan | None = None
    ) -> None:
        self._context = context
        self._request = request
        self._operation = operation
        self._done: types.SampleStreamDone | None = None
        self._size = prompt_bytes(request.prompt)
        self._stream: CallStream | None = None
        self._parser = EventParser()
        self._holds_slot = False
        self._counts = [0] * request.num_samples
        """The number of tokens read of each sample."""
        self._failure: Exception | None = None
        """The error that ends the stream after the tokens before it."""
        self._reading: asyncio.Task[object] | None = None
        """The task that waits for the next events."""
        self.over = False
        self.streamed = True
        self.request_id: str | None = None
        self.received: list[types.SampledToken] = []

    @classmethod
    def of(
        cls,
        context: StreamContext,
        prompt: types.ModelInput,
        num_samples: int,
        params: types.SamplingParams,
        sampling_session_id: str,
        record_stability_info: bool,
    ) -> StreamSource:
        """The source of a sample, validated; nothing is sent before the first event is requested."""
        context.session.check_open()
        check_sample(prompt, num_samples, params)
        request = types.SampleRequest(
            prompt=prompt,
            sampling_params=params,
            num_samples=num_samples,
            sampling_session_id=sampling_session_id,
            record_stability_info=record_stability_info,
        )
        check_offered(request.sampling_params, context.opened.client_config)
        return cls(context, request, sampling_span("sample_stream", context.session, context.opened, request))

    async def next_events(self) -> Sequence[types.SampleStreamEvent]:
        """The events since the last call, at least one; none at the end of the stream."""
        if self.over:
            return ()
        self._reading = reading = asyncio.current_task()
        assert reading is not None
        try:
            with use_operation(self._operation):
                events = await self._next()
        except BaseException as error:
            was_closed = self._is_closed()
            self._reading = None
            await self.close()
            if was_closed and isinstance(error, asyncio.CancelledError) and reading.uncancel() == 0:
                return ()  # close() cancelled the wait, not the task that waits
            if was_closed and isinstance(error, TinkexError):
                return ()  # the stream was closed on purpose
            raise
        finally:
            self._reading = None
        if self._is_closed():
            return ()
        if self._operation is not None and not self.received:
            self._operation.add_event("tinkex.first_token", {})
        self.received += [event for event in events if isinstance(event, types.SampledToken)]
        if isinstance(events[-1], types.SampleStreamDone):
            self._done = events[-1]
            await self.close()
        return events

    def _is_closed(self) -> bool:
        """Whether the stream was closed, maybe while this task waited."""
        return self.over

    async def close(self) -> None:
        """Cancels the sample, on the server too."""
        self.over = True
        if self._operation is not None:
            done = self._done
            self._operation.set_attributes(
                {
                    "tinkex.streamed": self.streamed,
                    "gen_ai.usage.output_tokens": len(self.received),
                    "gen_ai.response.finish_reasons": None if done is None else tuple(done.stop_reasons),
                }
            )
            self._operation.end(asyncio.CancelledError() if done is None else None)
        stream, self._stream = self._stream, None
        if self._holds_slot:
            self._holds_slot = False
            self._context.in_flight.release(1)
        if stream is not None:
            await stream.close()
        reading, self._reading = self._reading, None
        if reading is not None and reading is not asyncio.current_task():
            reading.cancel()  # it may wait for long: for the server, for a limit, or for a retry

    async def _next(self) -> Sequence[types.SampleStreamEvent]:
        began, attempt = time.monotonic(), 0
        while not self.over:
            try:
                if self._stream is None:
                    await self._open(attempt)
                return await self._read()
            except APIStatusError as error:
                if error.status_code in NO_SUCH_ENDPOINT:
                    return await self._without_streaming(error.status_code)
                await self._pause(error, attempt, time.monotonic() - began)
            except APIConnectionError as error:
                if self.received:
                    raise StreamInterruptedError(
                        error.request,
                        f"the stream was interrupted after {len(self.received)} tokens: {error.message}",
                        tuple(self.received),
                    ) from error
                await self._pause(error, attempt, time.monotonic() - began)
            except self._context.retries.kinds as error:
                await self._pause(error, attempt, time.monotonic() - began)
            attempt += 1
        return ()

    async def _open(self, attempt: int) -> None:
        context = self._context
        if not self._holds_slot:
            await context.in_flight.acquire(1)
            self._holds_slot = True
            self._check_not_closed()
        # The server may have cancelled an interrupted attempt: the next one is a sample of its own.
        body = sample_body(self._request, await context.next_seq_id())
        self._parser, self._failure = EventParser(), None
        self._counts = [0] * self._request.num_samples
        submission = functools.partial(
            context.session.caller.stream, _STREAM, body, headers=BACKPRESSURE, attempt=attempt
        )
        self._stream = await submit_paced(context.opened, context.session.caller, submission, self._size)
        self._check_not_closed()
        kind = self._stream.content_type
        if kind and EVENT_STREAM not in kind.lower():
            raise APIResponseValidationError(
                None,
                None,
                f"the reply to {_STREAM.name} is {kind!r} and not a stream; check the proxies in front of the server",
            )

    def _check_not_closed(self) -> None:
        """Raises ``ClosedError`` if the stream was closed meanwhile."""
        if self.over:
            raise ClosedError("the stream was closed")

    async def _read(self) -> Sequence[types.SampleStreamEvent]:
        while True:
            if self._failure is not None:
                raise self._failure
            if self._stream is None:
                raise ClosedError("the stream was closed")
            chunk = await self._stream.read()
            if not chunk:
                raise APIConnectionError(
                    self._context.session.caller.about(_STREAM),
                    "the server ended the stream before the end of the sample",
                )
            events = self._parse(chunk)
            if events:
                return events

    def _parse(self, chunk: bytes) -> list[types.SampleStreamEvent]:
        """The events in a chunk, up to the last of the sample; an error among them is raised by the next call."""
        events: list[types.SampleStreamEvent] = []
        try:
            for event in self._parser.feed(chunk):
                parsed = self._event(event)
                if parsed is not None:
                    events.append(parsed)
                if isinstance(parsed, types.SampleStreamDone):
                    break
        except RequestFailedError as error:
            self._failure = error
        except ValueError as error:
            self._failure = APIResponseValidationError(
                None, None, f"the stream does not follow the protocol: {error}"
            )
            self._failure.__cause__ = error
        return events

    def _event(self, event: ServerSentEvent) -> types.SampleStreamEvent | None:
        match event.name:
            case "token":
                return self._in_order(json.decode(event.data, types.SampledToken))
            case "done":
                return self._complete(json.decode(event.data, types.SampleStreamDone))
            case "accepted":
                self.request_id = json.decode(event.data, types.UntypedAPIFuture).request_id
                if self._operation is not None:
                    self._operation.add_request_id(self.request_id)
            case "error":
                error = json.decode_any(event.data)
                if not isinstance(error, dict):
                    raise ValueError("an error that is not an object")
                raise RequestFailedError(
                    f"the sample failed after {sum(self._counts)} tokens: {error.get('error', 'no reason given')}",
                    self.request_id or "",
                    RequestErrorCategory.parse(error.get("category")),
                )
            case _:
                pass  # an event of a newer server
        return None

    def _in_order(self, token: types.SampledToken) -> types.SampledToken:
        if not 0 <= token.sample < len(self._counts):
            raise ValueError(f"a token of sample {token.sample}, but there are {len(self._counts)} samples")
        expected = self._counts[token.sample]
        if token.index != expected:
            raise ValueError(f"token {token.index} of sample {token.sample} instead of token {expected}")
        self._counts[token.sample] += 1
        return token

    def _complete(self, done: types.SampleStreamDone) -> types.SampleStreamDone:
        if done.num_tokens != sum(self._counts) or len(done.stop_reasons) != len(self._counts):
            raise ValueError(
                f"{sum(self._counts)} tokens of {len(self._counts)} samples arrived, and its last event counts "
                f"{done.num_tokens} of {len(done.stop_reasons)}"
            )
        return done

    async def _pause(self, error: Exception, attempt: int, elapsed: float) -> None:
        """Waits before the next attempt, or raises the error if it must not be retried."""
        stream, self._stream = self._stream, None
        if stream is not None:
            await stream.close()
        if self.received:
            raise error
        await self._context.retries.pause(_STREAM.name, error, attempt, elapsed)

    async def _without_streaming(self, status: int) -> Sequence[types.SampleStreamEvent]:
        """The same sample without streaming, for servers that do not support it."""
        context = self._context
        self._holds_slot = False
        context.in_flight.release(1)  # the sample acquires its own
        response = await context.sample(self._request)
        self.streamed = False
        context.session.caller.sink.emit(
            StreamingUnavailable(self._request.sampling_session_id or "", status)
        )
        events: list[types.SampleStreamEvent] = []
        for sample, sequence in enumerate(response.sequences):
            last = len(sequence.tokens) - 1
            logprobs: Sequence[float | None] = sequence.logprobs or [None] * len(sequence.tokens)
            events += [
                types.SampledToken(
                    sample=sample,
                    index=index,
                    token=token,
                    logprob=logprob,
                    stop_reason=sequence.stop_reason if index == last else None,
                )
                for index, (token, logprob) in enumerate(zip(sequence.tokens, logprobs, strict=True))
            ]
        done = types.SampleStreamDone(
            stop_reasons=[sequence.stop_reason for sequence in response.sequences],
            num_tokens=len(events),
            num_prompt_tokens=self._request.prompt.length,
            prompt_cache_hit_tokens=response.prompt_cache_hit_tokens,
            streamed=False,
        )
        return [*events, done]


class _StreamWrapper:
    """What both wrappers share."""

    def __init__(self, source: StreamSource) -> None:
        self._source = source
        self._events: deque[types.SampleStreamEvent] = deque()
        # A stream that is garbage collected is cancelled on the server too.
        weakref.finalize(self, _close_later, source).atexit = False

    @property
    def streamed(self) -> bool:
        """False if the server does not support streaming: then all tokens come together."""
        return self._source.streamed

    @property
    def request_id(self) -> str | None:
        """The server's id of the sample, once the server has accepted it."""
        return self._source.request_id

    @property
    def received(self) -> Sequence[types.SampledToken]:
        """The tokens received so far."""
        return tuple(self._source.received)


class SampleStream(_StreamWrapper):
    """The tokens of a sample as they are sampled; close it, or leave its ``with`` block, to cancel the sample."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> types.SampleStreamEvent:
        if not self._events:
            self._events.extend(background().run(self._source.next_events()))
        if not self._events:
            raise StopIteration
        return self._events.popleft()

    def close(self) -> None:
        """Cancels the sample; closing twice does nothing."""
        self._events.clear()
        background().run(self._source.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncSampleStream(_StreamWrapper):
    """The tokens of a sample as they are sampled, for asynchronous code."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> types.SampleStreamEvent:
        if not self._events:
            self._events.extend(
                await await_future(background().submit(self._source.next_events()), propagate_cancel=True)
            )
        if not self._events:
            raise StopAsyncIteration
        return self._events.popleft()

    async def aclose(self) -> None:
        """Cancels the sample; closing twice does nothing."""
        self._events.clear()
        await await_future(background().submit(self._source.close()))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


def _close_later(source: StreamSource) -> None:
    if not source.over:
        with contextlib.suppress(RuntimeError):  # the program is ending, and its connections with it
            background().start(source.close())
