"""Token streaming: server-sent events while a sample is decoded.

Every token is an event ``token``; then follows one ``done`` or one ``error``. A sample is cancelled if its client
disconnects.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping

from tinkex._wire import json as wire_json
from tinkex.engine.api.call import Call, Handler, Reply
from tinkex.engine.api.detokenizer import IncrementalDetokenizer
from tinkex.engine.api.event_stream import KEEP_ALIVE, EventStream, SampleEvents, sample_events
from tinkex.engine.intake.assets import check_pointers
from tinkex.engine.running.feeds import StreamedToken
from tinkex.engine.served_models import ServedModel
from tinkex.errors import InvalidInput, RequestFailedError, TinkexError
from tinkex.types import SampleRequest, SampleResponse, UntypedAPIFuture

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
    events = TokenEvents(model, request, accepted)
    return EventStream(events.encode(sample_events(engine, call.owner, accepted)))


class TokenEvents:
    """The events of one accepted sample."""

    def __init__(self, model: ServedModel, request: SampleRequest, accepted: UntypedAPIFuture) -> None:
        self._model = model
        self._request = request
        self._accepted = accepted
        self._detokenizers: dict[int, IncrementalDetokenizer] = {}

    async def encode(self, sample: SampleEvents) -> AsyncGenerator[bytes, None]:
        """Yields the events as they are sent."""
        async with contextlib.aclosing(sample):
            await anext(sample)
            accepted = self._accepted
            yield _event(
                "accepted",
                {"request_id": accepted.request_id, "sample_sequence_ids": accepted.sample_sequence_ids},
            )
            try:
                async for batch in sample:
                    if isinstance(batch, SampleResponse):
                        yield _event("done", self._done_fields(batch))
                    else:
                        tokens = [_event("token", self._token_fields(token)) for token in batch]
                        yield b"".join(tokens) or KEEP_ALIVE
            except RequestFailedError as error:
                yield _event("error", {"error": error.message, "category": error.category})
            except TinkexError as error:
                yield _event("error", {"error": str(error), "category": "server"})

    def _done_fields(self, response: SampleResponse) -> dict[str, object]:
        return {
            "stop_reasons": [sequence.stop_reason for sequence in response.sequences],
            "num_tokens": sum(len(sequence.tokens) for sequence in response.sequences),
            "num_prompt_tokens": self._request.prompt.length,
            "prompt_cache_hit_tokens": response.prompt_cache_hit_tokens,
        }

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


HANDLERS: Mapping[str, Handler] = {"stream_sample": stream_sample}
