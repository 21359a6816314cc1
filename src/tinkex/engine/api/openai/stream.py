"""Streams of the OpenAI protocol: chunks as server-sent events, then ``[DONE]``."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from itertools import groupby
from typing import Any, Protocol

from tinkex._wire import json as wire_json
from tinkex.engine.api.compatible.samples import error_data
from tinkex.engine.api.dialects import OPENAI
from tinkex.engine.api.event_stream import KEEP_ALIVE
from tinkex.engine.running.feeds import StreamedToken
from tinkex.errors import TinkexError
from tinkex.types import SampleResponse

DONE = b"data: [DONE]\n\n"


class ChunkEncoder(Protocol):
    """Makes the chunks of one request."""

    include_usage: bool

    def start(self) -> Sequence[Mapping[str, Any]]:
        """The chunks before the first token."""
        ...

    def tokens(self, number: int, sample: int, batch: Sequence[StreamedToken]) -> Sequence[Mapping[str, Any]]:
        """The chunks for new tokens of sequence ``sample`` of prompt ``number``."""
        ...

    def end(self, number: int, response: SampleResponse) -> Sequence[Mapping[str, Any]]:
        """The chunks for the end of prompt ``number``."""
        ...

    def usage(self) -> Mapping[str, Any]:
        """The last chunk, with the usage."""
        ...


async def encode_stream(
    samples: AsyncGenerator[tuple[int, Any], None], chunks: ChunkEncoder, names: Mapping[str, str]
) -> AsyncGenerator[bytes, None]:
    """Yields the events of a stream; a failure is an event with an error, which names the client's fields, and ends it."""
    async with contextlib.aclosing(samples):
        await anext(samples)
        yield _events(chunks.start(), chunks) or KEEP_ALIVE
        try:
            async for number, item in samples:
                if isinstance(item, SampleResponse):
                    block = _events(chunks.end(number, item), chunks)
                    if block:
                        yield block
                elif not item:
                    yield KEEP_ALIVE
                else:
                    found = [
                        chunk
                        for sample, batch in groupby(item, lambda token: token.sample)
                        for chunk in chunks.tokens(number, sample, list(batch))
                    ]
                    if found:
                        yield _events(found, chunks)
        except TinkexError as error:
            yield _event(error_data(OPENAI, error, names))
            return
        if chunks.include_usage:
            yield _event(chunks.usage())
        yield DONE


def usage(
    prompt_lengths: Sequence[int], responses: Sequence[SampleResponse], *, scores_only: bool = False
) -> Mapping[str, Any]:
    """The usage of a request: each prompt counts once, and every sampled token, also the one that ended its sequence."""
    prompt = sum(prompt_lengths)
    sampled = 0 if scores_only else sum(len(s.tokens_np) for r in responses for s in r.sequences)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": sum(r.prompt_cache_hit_tokens for r in responses)},
    }


def new_id(prefix: str) -> str:
    """An id for a response."""
    return f"{prefix}{secrets.token_hex(16)}"


def _events(chunks: Sequence[Mapping[str, Any]], encoder: ChunkEncoder) -> bytes:
    extra: Mapping[str, Any] = {"usage": None} if encoder.include_usage else {}
    return b"".join([_event({**chunk, **extra}) for chunk in chunks])


def _event(data: Mapping[str, Any]) -> bytes:
    return b"data: " + wire_json.encode(data, omit_none=False) + b"\n\n"
