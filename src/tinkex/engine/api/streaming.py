"""Samples token by token: server-sent events while the decode batch goes on.

Every token is an event ``token``; then comes one ``done`` or one ``error``. A caller that goes away ends the sample.
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
"""How often a caller hears something while its sample waits, so that nothing on the way takes it for dead."""

NOT_STREAMED = (
    "prompt_logprobs",
    "topk_prompt_logprobs",
    "topk_sample_logprobs",
    "target_prompt_logprobs",
    "prompt_alt_tokens_k",
    "prompt_logprobs_last_n",
)


async def stream_sample(call: Call) -> Reply:
    """Accept a prompt as ``asample`` does; the answer is its tokens as they are drawn."""
    request: SampleRequest = call.request
    engine = call.engine
    sampler = engine.admission.find_sampler(call.owner, request)
    for name in NOT_STREAMED:
        if getattr(request, name):
            raise InvalidInput(f"{name} is not part of a stream; leave it out, or ask for it with asample.")
    model = engine.models.find(sampler.base_model)
    if not model.known:
        await engine.load(model)
    await asyncio.to_thread(lambda: model.tokenizer)  # before the first token waits for it
    try:
        accepted = await engine.accept(call.owner, request, call.body)
    except InvalidInput:
        check_pointers(engine.store, call.owner, request.prompt)  # says more of a pointer to nothing
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
        """Tell the events, until the last one or until the caller goes away."""
        del scope  # nothing in it changes what is told
        gone = asyncio.create_task(_gone(receive))
        telling = asyncio.create_task(self._tell(send))
        try:
            await asyncio.wait({gone, telling}, return_when=asyncio.FIRST_COMPLETED)
            if telling.done():
                with contextlib.suppress(OSError):  # the caller went away in the middle of an event
                    telling.result()
        finally:
            for task in (gone, telling):
                task.cancel()
            await asyncio.gather(gone, telling, return_exceptions=True)

    async def _tell(self, send: Send) -> None:
        request_id = self._accepted.request_id
        feed = TokenFeed()
        ending = asyncio.create_task(self._end())
        ending.add_done_callback(lambda _: feed.notify())
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
            while not ending.done():
                try:
                    async with asyncio.timeout(KEEP_ALIVE_S):
                        await feed.changed()
                except TimeoutError:
                    await _write(send, b": waiting\n\n")
                    continue
                told = self._told(feed.read())
                if told:
                    await _write(send, told)
            await _write(send, self._last(feed, ending.result()), more=False)
        finally:
            ending.cancel()
            self._engine.unwatch(request_id)
            if self._outcome is None:
                with contextlib.suppress(TinkexError):  # it ended at the same moment
                    self._engine.cancel(self._owner, request_id)

    async def _end(self) -> Outcome | TinkexError:
        """How the sample ends."""
        patience = self._engine.config.long_poll_s
        while self._outcome is None:
            began = time.monotonic()
            try:
                self._outcome = await self._engine.wait(self._owner, self._accepted.request_id, patience)
            except TinkexError as error:
                return error
            if self._outcome is None and time.monotonic() - began < patience / 2:
                return ModelUnavailable("the server is stopping; sample again when it is back.")
        return self._outcome

    def _last(self, feed: TokenFeed, end: Outcome | TinkexError) -> bytes:
        if isinstance(end, TinkexError):
            return _event("error", {"error": str(end), "category": "server"})
        if end.status is not FutureStatus.DONE:
            return _event("error", {"error": end.error, "category": end.category})
        ids = self._accepted.sample_sequence_ids or []
        response = wire_proto.decode_sample_response(end.result, ids)
        rest = [
            drawn
            for sample, sequence in enumerate(response.sequences)
            for drawn in feed.read_rest(
                sample, sequence.tokens, sequence.logprobs or [], sequence.stop_reason
            )
        ]
        done = {
            "stop_reasons": [sequence.stop_reason for sequence in response.sequences],
            "num_tokens": sum(len(sequence.tokens) for sequence in response.sequences),
            "num_prompt_tokens": self._request.prompt.length,
            "prompt_cache_hit_tokens": response.prompt_cache_hit_tokens,
        }
        return self._told(rest) + _event("done", done)

    def _told(self, drawn: Iterable[StreamedToken]) -> bytes:
        return b"".join([_event("token", self._token(each)) for each in drawn])

    def _token(self, drawn: StreamedToken) -> dict[str, object]:
        detokenizer = self._detokenizers.get(drawn.sample)
        if detokenizer is None:
            tokenizer = self._model.tokenizer
            detokenizer = self._detokenizers[drawn.sample] = IncrementalDetokenizer(
                self._request.sampling_params.stop, lambda token: tokenizer.decode_bytes([token])
            )
        told: dict[str, object] = {
            "sample": drawn.sample,
            "index": drawn.index,
            "token": drawn.token,
            "logprob": drawn.logprob,
            "text": detokenizer.add(drawn.token, drawn.stop_reason),
        }
        if drawn.stop_reason is not None:
            told["stop_reason"] = drawn.stop_reason
        return told


def _event(name: str, data: Mapping[str, object]) -> bytes:
    # JSON escapes line ends, so the data is always one line.
    return b"event: " + name.encode() + b"\ndata: " + wire_json.encode(data) + b"\n\n"


async def _write(send: Send, body: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def _gone(receive: Receive) -> None:
    """Returns when the caller goes away."""
    while (await receive())["type"] != "http.disconnect":
        pass


HANDLERS: Mapping[str, Handler] = {"stream_sample": stream_sample}
