"""``POST /v1/messages`` and ``POST /v1/messages/count_tokens``."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinkex._wire import json as wire_json
from tinkex.engine.api.anthropic.prompts import ignored_fields, prepare_prompt
from tinkex.engine.api.anthropic.requests import MessageRequest, PromptRequest
from tinkex.engine.api.call import Call, Reply
from tinkex.engine.api.compatible.chat import PreparedChat, chat_stop
from tinkex.engine.api.compatible.chat_template import find_template
from tinkex.engine.api.compatible.fields import ignored_header
from tinkex.engine.api.compatible.models import ModelChoice, find_model
from tinkex.engine.api.compatible.output import OutputParser, Part, Reasoning, Text, join_parts
from tinkex.engine.api.compatible.samples import (
    await_responses,
    error_data,
    find_stop,
    new_detokenizer,
    sample_request,
    sampling_params,
    stream_samples,
    submit,
    text_of,
)
from tinkex.engine.api.compatible.tool_formats import ToolCall, new_call_id
from tinkex.engine.api.dialects import ANTHROPIC
from tinkex.engine.api.errors import json_response
from tinkex.engine.api.event_stream import EventStream
from tinkex.engine.api.field_errors import InvalidField
from tinkex.engine.encoding import body_size
from tinkex.engine.running.feeds import StreamedToken
from tinkex.errors import TinkexError
from tinkex.types import SampleResponse, SamplingParams

PING = b'event: ping\ndata: {"type":"ping"}\n\n'


@dataclass(frozen=True)
class MessagePlan:
    """A request, translated."""

    id: str
    request: MessageRequest
    model: ModelChoice
    chat: PreparedChat
    params: SamplingParams

    def message(
        self, content: Sequence[Mapping[str, Any]], end: Mapping[str, Any], num_tokens: int
    ) -> dict[str, Any]:
        """The message of a response; ``end`` says why it ended."""
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.request.model,
            "content": content,
            **end,
            "usage": {"input_tokens": len(self.chat.prompt), "output_tokens": num_tokens},
        }

    def end(self, stop_reason: str, parser: OutputParser, tokens: Sequence[int]) -> dict[str, Any]:
        """Why the answer ended."""
        if stop_reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        stop = find_stop(self.model, self.params, tokens)
        if stop in (self.request.stop_sequences or ()):
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        return {"stop_reason": "tool_use" if parser.has_calls else "end_turn", "stop_sequence": None}


async def messages(call: Call) -> Reply:
    """Answer a chat; the reply is a message or, with ``stream``, its events."""
    request: MessageRequest = call.request
    params = _params(request)
    model = await find_model(call.engine, call.owner, request.model)
    chat = await prepare_prompt(model, request, body_size(call.body))
    stop = chat_stop(model, request.stop_sequences)
    params = params.model_copy(update={"stop": stop, "structured_output": chat.structured_output})
    plan = MessagePlan(f"msg_{secrets.token_hex(16)}", request, model, chat, params)
    headers = ignored_header(ignored_fields(request, find_template(model)))
    names = {**chat.field_names, "stop": "stop_sequences"}
    accepted = await submit(call, [sample_request(model, chat.prompt, params)], names)
    if request.stream:
        return EventStream(_events(plan, stream_samples(call, accepted), names), headers)
    (response,) = await await_responses(call, accepted, names)
    (sequence,) = response.sequences
    parser = chat.new_parser()
    parts = [*parser.add(text_of(model, params, sequence)), *parser.finish()]
    end = plan.end(sequence.stop_reason, parser, sequence.tokens)
    body = plan.message([_block(plan, part) for part in join_parts(parts)], end, len(sequence.tokens))
    return json_response(body, headers=headers, omit_none=False)


async def count_tokens(call: Call) -> Reply:
    """Returns the number of tokens of a prompt."""
    request: PromptRequest = call.request
    model = await find_model(call.engine, call.owner, request.model)
    chat = await prepare_prompt(model, request, body_size(call.body))
    return json_response(
        {"input_tokens": len(chat.prompt)},
        headers=ignored_header(ignored_fields(request, find_template(model))),
    )


def _params(request: MessageRequest) -> SamplingParams:
    if request.max_tokens < 1:
        raise InvalidField("max_tokens", f"max_tokens is {request.max_tokens}; give at least 1.")
    if "" in (request.stop_sequences or ()):
        raise InvalidField(
            "stop_sequences", "stop_sequences has an empty string, which would stop immediately; remove it."
        )
    return sampling_params(
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
    )


def _block(plan: MessagePlan, part: Part) -> dict[str, Any]:
    match part:
        case Text():
            return {"type": "text", "text": part.text}
        case Reasoning():
            return {"type": "thinking", "thinking": part.text, "signature": ""}
        case ToolCall():
            arguments = json.loads(part.arguments)
            return {
                "type": "tool_use",
                "id": new_call_id(plan.chat.tool_format, "toolu_"),
                "name": part.name,
                "input": arguments,
            }


async def _events(
    plan: MessagePlan, samples: AsyncGenerator[tuple[int, Any], None], names: Mapping[str, str]
) -> AsyncGenerator[bytes, None]:
    """Yields the events of a stream; a failure is an ``error`` event, and ends it."""
    answer = StreamedAnswer(plan)
    async with contextlib.aclosing(samples):
        await anext(samples)
        empty = plan.message([], {"stop_reason": None, "stop_sequence": None}, 0)
        yield _event({"type": "message_start", "message": empty})
        try:
            async for _, item in samples:
                if isinstance(item, SampleResponse):
                    yield _encode(answer.end(item))
                elif not item:
                    yield PING
                elif block := _encode(answer.add(item)):  # empty while a tool call is incomplete
                    yield block
        except TinkexError as error:
            yield _event(error_data(ANTHROPIC, error, names))


class StreamedAnswer:
    """The events of an answer: blocks that start, grow and stop."""

    def __init__(self, plan: MessagePlan) -> None:
        self._plan = plan
        self._parser = plan.chat.new_parser()
        self._detokenizer = new_detokenizer(plan.model, plan.params)
        self._index = -1
        self._open: type[Text | Reasoning] | None = None

    def add(self, batch: Sequence[StreamedToken]) -> list[dict[str, Any]]:
        """The events for new tokens."""
        text = "".join([self._detokenizer.add(token.token, token.stop_reason) for token in batch])
        parts = self._parser.add(text)
        if batch[-1].stop_reason is not None:
            parts += self._parser.finish()
        return [event for part in parts for event in self._part(part)]

    def end(self, response: SampleResponse) -> list[dict[str, Any]]:
        """The last events."""
        (sequence,) = response.sequences
        end = self._plan.end(sequence.stop_reason, self._parser, sequence.tokens)
        usage = {"input_tokens": len(self._plan.chat.prompt), "output_tokens": len(sequence.tokens)}
        return [
            *self._stop(),
            {"type": "message_delta", "delta": end, "usage": usage},
            {"type": "message_stop"},
        ]

    def _part(self, part: Part) -> list[dict[str, Any]]:
        if isinstance(part, ToolCall):
            block = {
                "type": "tool_use",
                "id": new_call_id(self._plan.chat.tool_format, "toolu_"),
                "name": part.name,
                "input": {},
            }
            delta = {"type": "input_json_delta", "partial_json": part.arguments}
            return [*self._start(block), self._delta(delta), *self._stop(ToolCall)]
        events = []
        is_text = isinstance(part, Text)
        if self._open is not type(part):
            block = (
                {"type": "text", "text": ""}
                if is_text
                else {"type": "thinking", "thinking": "", "signature": ""}
            )
            events += self._start(block)
            self._open = type(part)
        delta = {"type": "text_delta", "text": part.text}
        if not is_text:
            delta = {"type": "thinking_delta", "thinking": part.text}
        return [*events, self._delta(delta)]

    def _start(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        events = self._stop()
        self._index += 1
        return [*events, {"type": "content_block_start", "index": self._index, "content_block": block}]

    def _delta(self, delta: Mapping[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _stop(self, kind: type[ToolCall] | None = None) -> list[dict[str, Any]]:
        if self._open is None and kind is None:
            return []
        self._open = None
        return [{"type": "content_block_stop", "index": self._index}]


def _encode(events: Sequence[Mapping[str, Any]]) -> bytes:
    return b"".join([_event(event) for event in events])


def _event(event: Mapping[str, Any]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (event["type"].encode(), wire_json.encode(event, omit_none=False))
