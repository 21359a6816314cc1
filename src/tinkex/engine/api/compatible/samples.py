"""Samples of a compatible route: submitted like native ones, awaited or streamed, and cancelled with their client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from tinkex.engine.api.call import Call
from tinkex.engine.api.compatible.models import ModelChoice
from tinkex.engine.api.detokenizer import IncrementalDetokenizer
from tinkex.engine.api.dialects import Dialect
from tinkex.engine.api.errors import status_of
from tinkex.engine.api.event_stream import (
    SampleEvents,
    await_outcome,
    cancel_sample,
    read_response,
    sample_events,
)
from tinkex.engine.api.field_errors import InvalidField, rename_field
from tinkex.engine.encoding import encode_request
from tinkex.errors import (
    EngineError,
    EngineFailure,
    InvalidInput,
    RequestErrorCategory,
    RequestFailedError,
    TinkexError,
)
from tinkex.types import (
    ModelInput,
    SampledSequence,
    SampleRequest,
    SampleResponse,
    SamplingParams,
    UntypedAPIFuture,
)

SAMPLING_NAMES: Mapping[str, str] = {
    **{
        name: name
        for name in ("prompt", "max_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "logit_bias")
    },
    "num_samples": "n",
}
"""The names that clients usually have for native fields which a model's limits may reject."""
MAX_LOOP_CHARS = 16 * 1024
"""The text that is tokenized on the event loop, in a few milliseconds."""


async def encode_text(model: ModelChoice, text: str, field: str, *, add_special_tokens: bool) -> list[int]:
    """The tokens of a text; long ones on a thread, and none of one that cannot fit into the context."""
    check_length(model, text, field)
    if len(text) <= MAX_LOOP_CHARS:
        return model.tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return await model.run_on_thread(
        lambda: model.tokenizer.encode(text, add_special_tokens=add_special_tokens)
    )


def check_length(model: ModelChoice, prompt: str | Sequence[int], field: str) -> None:
    """Reject what cannot fit into the context, before it costs time."""
    if not isinstance(prompt, str):
        if len(prompt) > model.max_context:
            raise InvalidField(
                field,
                f"{field} has {len(prompt):,} tokens, and the context of {model.name} holds {model.max_context:,}; send less.",
            )
    elif len(prompt) > model.max_context * model.tokenizer.max_token_bytes:
        raise InvalidField(
            field,
            f"{field} has {len(prompt):,} characters, which are more tokens than the {model.max_context:,} that the context of "
            f"{model.name} holds; send less.",
        )


def sampling_params(**fields: Any) -> SamplingParams:
    """The parameters of a sample; an invalid one is named as the client names it."""
    given = {name: value for name, value in fields.items() if value is not None}
    try:
        return SamplingParams(**given)
    except ValueError as error:
        message = str(error).replace("SamplingParams.", "")
        name = message.partition(" ")[0].partition("[")[0].removesuffix(":")
        raise InvalidField(name if name in fields else "", message) from error


def sample_request(
    model: ModelChoice, prompt: Sequence[int], params: SamplingParams, num_samples: int = 1, **more: Any
) -> SampleRequest:
    """The native request for a prompt."""
    try:
        model_input = ModelInput.from_ints(prompt)
    except (ValueError, OverflowError) as error:
        raise InvalidField("prompt", f"prompt has a token id that is not valid: {error}.") from error
    return SampleRequest(
        prompt=model_input,
        sampling_params=params,
        num_samples=num_samples,
        base_model=model.base_model,
        model_path=model.model_path,
        **more,
    )


async def submit(
    call: Call, requests: Sequence[SampleRequest], names: Mapping[str, str]
) -> Sequence[UntypedAPIFuture]:
    """Submit samples: all of them, or none if one is rejected. ``names`` has other names that the client has for native fields."""
    engine, owner = call.engine, call.owner
    accepting = asyncio.gather(
        *(engine.accept(owner, request, encode_request(request)) for request in requests),
        return_exceptions=True,
    )
    try:
        results = await asyncio.shield(accepting)
    except asyncio.CancelledError as error:  # the client has disconnected; what is accepted now is cancelled
        results = [*(await accepting), error]
    accepted = [result for result in results if isinstance(result, UntypedAPIFuture)]
    rejected = next((result for result in results if isinstance(result, BaseException)), None)
    if rejected is not None:
        for each in accepted:
            cancel_sample(engine, owner, each.request_id)
        raise _renamed(rejected, names) if isinstance(rejected, EngineError) else rejected
    return accepted


async def await_responses(
    call: Call, accepted: Sequence[UntypedAPIFuture], names: Mapping[str, str]
) -> Sequence[SampleResponse]:
    """The responses of submitted samples, in their order; they are cancelled if the caller is."""
    waiting = {each.request_id for each in accepted}
    try:
        responses = []
        for each in accepted:
            outcome = await await_outcome(call.engine, call.owner, each.request_id)
            waiting.discard(each.request_id)
            responses.append(read_response(each, outcome))
    except RequestFailedError as error:
        raise as_engine_error(error, names) from error
    finally:
        for request_id in waiting:
            cancel_sample(call.engine, call.owner, request_id)
    return responses


def as_engine_error(error: RequestFailedError, names: Mapping[str, str]) -> EngineError:
    """The failure of a sample as an error of the request that waits for it."""
    if error.category is RequestErrorCategory.User:
        return _renamed(InvalidInput(error.message), names)
    return EngineFailure(error.message)


def _renamed(error: EngineError, names: Mapping[str, str]) -> EngineError:
    return rename_field(error, {**SAMPLING_NAMES, **names})


def error_data(dialect: Dialect, error: TinkexError, names: Mapping[str, str]) -> Mapping[str, Any]:
    """The data of the event that ends a stream with a failure."""
    if isinstance(error, RequestFailedError):
        error = as_engine_error(error, names)
    if not isinstance(error, EngineError):
        error = EngineFailure(str(error))
    return dialect.error_body(status_of(error), {"detail": str(error)}, error)


async def stream_samples(
    call: Call, accepted: Sequence[UntypedAPIFuture]
) -> AsyncGenerator[tuple[int, Any], None]:
    """Yields what each of the samples yields, with its number, as it arrives; closing it cancels those that run."""
    streams = [sample_events(call.engine, call.owner, each) for each in accepted]
    async with contextlib.AsyncExitStack() as stack:
        for stream in streams:
            await stack.enter_async_context(contextlib.aclosing(stream))
            await anext(stream)  # started, so that closing it cancels the sample
        yield 0, ()
        if len(streams) == 1:
            async for item in streams[0]:
                yield 0, item
            return
        queue: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()
        pumps = [asyncio.create_task(_pump(n, stream, queue)) for n, stream in enumerate(streams)]
        stack.push_async_callback(_end, pumps)
        left = len(streams)
        while left:
            number, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            left -= isinstance(item, SampleResponse)
            yield number, item


async def _pump(number: int, stream: SampleEvents, queue: asyncio.Queue[tuple[int, Any]]) -> None:
    try:
        async for item in stream:
            queue.put_nowait((number, item))
    except Exception as error:  # noqa: BLE001 -- raised by the reader of the queue
        queue.put_nowait((number, error))


async def _end(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def text_of(model: ModelChoice, params: SamplingParams, sequence: SampledSequence) -> str:
    """The text of a sequence, the same as that of its stream: without the stop string, or the token that ended it."""
    tokens = sequence.tokens
    output = model.tokenizer.decode_bytes(tokens)
    if sequence.stop_reason == "stop":
        stop = find_stop(model, params, tokens)
        end = output.find(stop.encode()) if stop is not None else None
        output = output[:end] if end is not None else model.tokenizer.decode_bytes(tokens[:-1])
    return output.decode("utf-8", "replace")


def new_detokenizer(model: ModelChoice, params: SamplingParams) -> IncrementalDetokenizer:
    """The detokenizer of one sequence."""
    table = model.tokenizer.token_bytes

    def token_bytes(token: int) -> bytes:
        return table[token] if 0 <= token < len(table) else b""

    return IncrementalDetokenizer(params.stop, token_bytes)


def find_stop(model: ModelChoice, params: SamplingParams, tokens: Sequence[int]) -> str | None:
    """The stop string that ended a sequence, or None if a token did."""
    strings = [params.stop] if isinstance(params.stop, str) else params.stop or []
    output = model.tokenizer.decode_bytes(tokens)
    found = [
        (place, stop)
        for stop in strings
        if isinstance(stop, str) and (place := output.find(stop.encode("utf-8", "replace"))) >= 0
    ]
    return min(found, key=lambda each: each[0])[1] if found else None
