"""Token streaming: server-sent events while a sample is decoded.

Every token is an event ``token``; then follows one ``done`` or one ``error``. A sample is cancelled if its client
disconnects.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable, Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tinkex._wire import json as wire_json
from tinkex._wire import proto as wire_proto
from tinkex.engine.api.call import Call, Handler, Reply
from tinkex.engine.api.detokenizer import IncrementalDetokenizer
from tinkex.engine.engine import Engine
from tinkex.engine.intake.assets import check_pointers
from tinkex.engine.running.feeds import StreamedToken, TokenFeed
from tinkex.engine.served_models import ServedModel
from tinkex.engine.store import FutureStatus, Outcome
from tinkex.errors import InvalidInput, ModelUnavailable, TinkexError
from tinkex.types import SampleRequest, UntypedAPIFuture

EVENT_STREAM = "text/event-stream"
KEEP_ALIVE_S = 5.0
"""Interval of keep-alive comments while a sample waits, so that proxies do not close the connection."""

UNSUPPORTED_FIELDS = (
    "prompt_logprobs",
    "topk_prompt_logprobs",
    "topk_sample_logprobs",
    "target_prompt_logprobs",
    "prompt_alt_tokens_k",
    "prompt_logprobs_last_n",
)


async def stream_sample(call: Call) -> Reply:
    """Accept a prompt like ``asample``; the response streams its tokens as they are sampled."""
    request: SampleRequest = call.request
    engine = call.engine
    sampler = engine.admission.find_sampler(call.owner, request)
    for name in UNSUPPORTED_FIELDS:
        if getattr(request, name):
            raise InvalidInput(f"{name} is not supported in streams; omit it, or use asample.")
    model = engine.models.find(sampler.base_model)
    if not model.known:
        await engine.load(model)
    await asyncio.to_thread(
        lambda: model.tokenizer
    )  # loaded now, so that the first token does not wait for it
    try:
        accepted = await engine.accept(call.owner, request, call.body)
    except InvalidInput:
        check_pointers(engine.store, call.owner, request.prompt)  # its error names the invalid pointer
        raise
    return TokenStream(engine, call.owner, model, request, accepted)


class TokenStream(Response):
    """The events of one accepted sample."""

    media_type = EVENT_STREAM

    def __init__(
        self,
        engine: Engine,
        owner: str,
        model: ServedModel,
        request: SampleRequest,
        accepted: UntypedAPIFuture,
    ) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._engine = engine
        self._owner = owner
        self._model = model
        self._request = request
        self._accepted = accepted
        self._detokenizers: dict[int, IncrementalDetokenizer] = {}
        self._outcome: Outcome | None = None

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
        request_id = self._accepted.request_id
        feed = TokenFeed()
        outcome = asyncio.create_task(self._wait_for_outcome())
        outcome.add_done_callback(lambda _: feed.notify())
        self._engine.watch(request_id, feed)
        try:
            headers = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            await send(headers)
            await _write(
                send,
                _event(
                    "accepted",
                    {"request_id": request_id, "sample_sequence_ids": self._accepted.sample_sequence_ids},
                ),
            )
            while not outcome.done():
                try:
                    async with asyncio.timeout(KEEP_ALIVE_S):
                        await feed.changed()
                except TimeoutError:
                    await _write(send, b": waiting\n\n")
                    continue
                events = self._token_events(feed.read())
                if events:
                    await _write(send, events)
            await _write(send, self._final_events(feed, outcome.result()), more=False)
        finally:
            outcome.cancel()
            self._engine.unwatch(request_id)
            if self._outcome is None:
                with contextlib.suppress(TinkexError):  # it ended concurrently
                    self._engine.cancel(self._owner, request_id)

    async def _wait_for_outcome(self) -> Outcome | TinkexError:
        """Returns the outcome of the sample, or why it cannot be awaited."""
        timeout_s = self._engine.config.long_poll_s
        while self._outcome is None:
            started = time.monotonic()
            try:
                self._outcome = await self._engine.wait(self._owner, self._accepted.request_id, timeout_s)
            except TinkexError as error:
                return error
            if self._outcome is None and time.monotonic() - started < timeout_s / 2:
                return ModelUnavailable("the server is shutting down; retry when it is back.")
        return self._outcome

    def _final_events(self, feed: TokenFeed, outcome: Outcome | TinkexError) -> bytes:
        if isinstance(outcome, TinkexError):
            return _event("error", {"error": str(outcome), "category": "server"})
        if outcome.status is not FutureStatus.DONE:
            return _event("error", {"error": outcome.error, "category": outcome.category})
        ids = self._accepted.sample_sequence_ids or []
        response = wire_proto.decode_sample_response(outcome.result, ids)
        rest = [
            token
            for sample, sequence in enumerate(response.sequences)
            for token in feed.read_rest(
                sample, sequence.tokens, sequence.logprobs or [], sequence.stop_reason
            )
        ]
        done = {
            "stop_reasons": [sequence.stop_reason for sequence in response.sequences],
            "num_tokens": sum(len(sequence.tokens) for sequence in response.sequences),
            "num_prompt_tokens": self._request.prompt.length,
            "prompt_cache_hit_tokens": response.prompt_cache_hit_tokens,
        }
        return self._token_events(rest) + _event("done", done)

    def _token_events(self, tokens: Iterable[StreamedToken]) -> bytes:
        return b"".join([_event("token", self._token_fields(token)) for token in tokens])

    def _token_fields(self, token: StreamedToken) -> dict[str, object]:
        detokenizer = self._detokenizers.get(token.sample)
        if detokenizer is None:
            tokenizer = self._model.tokenizer
            detokenizer = self._detokenizers[token.sample] = IncrementalDetokenizer(
                self._request.sampling_params.stop, lambda token_id: tokenizer.decode_bytes([token_id])
            )
        fields: dict[str, object] = {
            "sample": token.sample,
            "index": token.index,
            "token": token.token,
            "logprob": token.logprob,
            "text": detokenizer.add(token.token, token.stop_reason),
        }
        if token.stop_reason is not None:
            fields["stop_reason"] = token.stop_reason
        return fields


def _event(name: str, data: Mapping[str, object]) -> bytes:
    # JSON escapes line breaks, so the data is always one line.
    return b"event: " + name.encode() + b"\ndata: " + wire_json.encode(data) + b"\n\n"


async def _write(send: Send, body: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def _wait_for_disconnect(receive: Receive) -> None:
    """Returns when the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


HANDLERS: Mapping[str, Handler] = {"stream_sample": stream_sample}
