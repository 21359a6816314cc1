"""``POST /chat/completions``: a chat rendered by the model's template, and its answer."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tinkex.engine.api.call import Call, Reply
from tinkex.engine.api.compatible.chat import PreparedChat, chat_stop, prepare, rendered_tools
from tinkex.engine.api.compatible.chat_template import Chat, ChatTemplate, find_template
from tinkex.engine.api.compatible.fields import given_fields, ignored_header
from tinkex.engine.api.compatible.models import ModelChoice, find_model
from tinkex.engine.api.compatible.output import OutputParser, Part, Reasoning, Text
from tinkex.engine.api.compatible.replies import choices_reply, count_values
from tinkex.engine.api.compatible.samples import (
    await_responses,
    new_detokenizer,
    sample_request,
    stream_samples,
    submit,
    text_of,
)
from tinkex.engine.api.compatible.token_text import TokenLogprobs, chat_logprobs
from tinkex.engine.api.compatible.tool_formats import ToolCall, ToolFormat, new_call_id
from tinkex.engine.api.detokenizer import IncrementalDetokenizer
from tinkex.engine.api.event_stream import EventStream
from tinkex.engine.api.field_errors import InvalidField
from tinkex.engine.api.openai.messages import chat_options, template_messages, template_variables
from tinkex.engine.api.openai.parameters import check_number, native_params
from tinkex.engine.api.openai.requests import IGNORED_IN_CHATS, ChatRequest
from tinkex.engine.api.openai.stream import encode_stream, new_id, usage
from tinkex.engine.encoding import body_size
from tinkex.engine.running.feeds import StreamedToken
from tinkex.types import SampledSequence, SampleResponse, SamplingParams

MAX_TOP_LOGPROBS = 20


@dataclass(frozen=True)
class ChatPlan:
    """A request, translated."""

    id: str
    request: ChatRequest
    model: ModelChoice
    chat: PreparedChat
    params: SamplingParams
    num_samples: int
    created: int = field(default_factory=lambda: int(time.time()))

    def envelope(self, kind: str, choices: Sequence[object]) -> dict[str, Any]:
        """A response, or a chunk of one."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.request.model,
            "choices": choices,
        }

    def usage(self, response: SampleResponse) -> Mapping[str, Any]:
        """The usage of the request."""
        return usage([len(self.chat.prompt)], [response])


async def chat_completions(call: Call) -> Reply:
    """Answer a chat; the reply is a response or, with ``stream``, its chunks."""
    request: ChatRequest = call.request
    plan = await _plan(call, request)
    headers = ignored_header(_ignored(request, find_template(plan.model)))
    sample = sample_request(
        plan.model,
        plan.chat.prompt,
        plan.params,
        plan.num_samples,
        topk_sample_logprobs=request.top_logprobs or 0,
    )
    names = {**plan.chat.field_names, "topk_sample_logprobs": "top_logprobs"}
    if request.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    accepted = await submit(call, [sample], names)
    if request.stream:
        stream = stream_samples(call, accepted)
        return EventStream(encode_stream(stream, ChatChunks(plan), names), headers)
    (response,) = await await_responses(call, accepted, names)
    choices = [partial(_choice, plan, index, sequence) for index, sequence in enumerate(response.sequences)]
    usage = {"usage": plan.usage(response)}
    return await choices_reply(
        call,
        choices,
        lambda made: plan.envelope("chat.completion", made) | usage,
        count_values([response], 0, request.top_logprobs or 0),
        headers,
    )


async def _plan(call: Call, request: ChatRequest) -> ChatPlan:
    num_samples = check_number("n", request.n, 1, call.engine.config.max_samples_per_request, default=1)
    if request.top_logprobs is not None:
        check_number("top_logprobs", request.top_logprobs, 0, MAX_TOP_LOGPROBS)
        if not request.logprobs:
            raise InvalidField("top_logprobs", "top_logprobs needs logprobs; set it to true.")
    max_tokens = _max_tokens(request)
    model = await find_model(call.engine, call.owner, request.model)
    template = find_template(model)
    options = chat_options(request, template)
    chat = Chat(
        messages=template_messages(template, request.messages),
        tools=rendered_tools(options),
        variables=template_variables(request, template),
        num_bytes=body_size(call.body),
    )
    prepared = await prepare(model, template, chat, options)
    params = native_params(
        request,
        max_tokens=max_tokens,
        stop=chat_stop(model, request.stop),
        structured_output=prepared.structured_output,
    )
    return ChatPlan(new_id("chatcmpl-"), request, model, prepared, params, num_samples)


def _max_tokens(request: ChatRequest) -> int | None:
    given = request.max_completion_tokens
    if given is not None and request.max_tokens not in {None, given}:
        raise InvalidField(
            "max_tokens", "max_tokens and max_completion_tokens differ; give max_completion_tokens only."
        )
    name = "max_completion_tokens" if given is not None else "max_tokens"
    value = given if given is not None else request.max_tokens
    if value is not None and value < 1:
        raise InvalidField(name, f"{name} is {value}; give at least 1, or leave it out for as many as fit.")
    return value


def _ignored(request: ChatRequest, template: ChatTemplate) -> list[str]:
    names = given_fields(request, IGNORED_IN_CHATS)
    form = request.response_format
    if form is not None and form.json_schema is not None and form.json_schema.description is not None:
        names.append("response_format.json_schema.description")
    if not template.renders_thoughts and any(message.reasoning_content for message in request.messages):
        names.append("messages.reasoning_content")
    return names


def _choice(plan: ChatPlan, index: int, sequence: SampledSequence) -> dict[str, Any]:
    parser = plan.chat.new_parser()
    text = text_of(plan.model, plan.params, sequence)
    parts = [*parser.add(text), *parser.finish()]
    content = "".join(part.text for part in parts if isinstance(part, Text))
    reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
    calls = [part for part in parts if isinstance(part, ToolCall)]
    message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [_call(plan.chat.tool_format, call) for call in calls]
    choice: dict[str, Any] = {
        "index": index,
        "message": message,
        "logprobs": None,
        "finish_reason": _finish_reason(sequence.stop_reason, parser),
    }
    if plan.request.logprobs:
        choice["logprobs"] = _logprobs(plan, TokenLogprobs.of_sample(sequence))
    if plan.request.return_token_ids:
        choice |= {"token_ids": sequence.tokens, "prompt_token_ids": list(plan.chat.prompt)}
    return choice


def _logprobs(plan: ChatPlan, scored: TokenLogprobs) -> dict[str, Any]:
    entries = chat_logprobs(plan.model.tokenizer, scored, plan.request.top_logprobs or 0)
    return {"content": entries, "refusal": None}


def _finish_reason(stop_reason: str, parser: OutputParser) -> str:
    return "tool_calls" if stop_reason == "stop" and parser.has_calls else stop_reason


def _call(tool_format: ToolFormat | None, call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": new_call_id(tool_format, "call_"), "type": "function", "function": function}


class _Answer:
    """One answer of a stream."""

    def __init__(self, parser: OutputParser, detokenizer: IncrementalDetokenizer) -> None:
        self.parser = parser
        self.detokenizer = detokenizer
        self.num_calls = 0


class ChatChunks:
    """The chunks of a stream."""

    def __init__(self, plan: ChatPlan) -> None:
        self._plan = plan
        self._answers = [
            _Answer(plan.chat.new_parser(), new_detokenizer(plan.model, plan.params))
            for _ in range(plan.num_samples)
        ]
        self._response: SampleResponse | None = None
        self.include_usage = bool(plan.request.stream_options and plan.request.stream_options.include_usage)

    def start(self) -> Sequence[Mapping[str, Any]]:
        """The chunks before the first token: the roles."""
        chunks = [
            self._chunk(index, {"role": "assistant", "content": ""})
            for index in range(self._plan.num_samples)
        ]
        if self._plan.request.return_token_ids:
            for chunk in chunks:
                chunk["choices"][0] |= {"token_ids": [], "prompt_token_ids": list(self._plan.chat.prompt)}
        return chunks

    def tokens(self, number: int, sample: int, batch: Sequence[StreamedToken]) -> Sequence[Mapping[str, Any]]:
        """The chunks for new tokens of one answer."""
        del number  # a chat has one prompt
        plan, answer = self._plan, self._answers[sample]
        text = "".join([answer.detokenizer.add(token.token, token.stop_reason) for token in batch])
        stop_reason = batch[-1].stop_reason
        parts = answer.parser.add(text)
        if stop_reason is not None:
            parts += answer.parser.finish()
        chunks = [self._chunk(sample, delta) for delta in self._deltas(answer, parts)]
        if plan.request.logprobs or plan.request.return_token_ids:
            if not chunks:
                chunks = [self._chunk(sample, {})]
            choice = chunks[0]["choices"][0]
            if plan.request.logprobs:
                choice["logprobs"] = _logprobs(plan, TokenLogprobs.of_stream(batch))
            if plan.request.return_token_ids:
                choice["token_ids"] = [token.token for token in batch]
        if stop_reason is not None:
            chunks.append(self._chunk(sample, {}, _finish_reason(stop_reason, answer.parser)))
        return chunks

    def end(self, number: int, response: SampleResponse) -> Sequence[Mapping[str, Any]]:
        """Take the response of the sample; its chunks have been sent."""
        del number
        self._response = response
        return []

    def usage(self) -> Mapping[str, Any]:
        """The last chunk, with the usage."""
        assert self._response is not None, "the stream has ended"
        plan = self._plan
        return plan.envelope("chat.completion.chunk", []) | {"usage": plan.usage(self._response)}

    def _deltas(self, answer: _Answer, parts: Sequence[Part]) -> Sequence[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        for part in parts:
            if isinstance(part, ToolCall):
                call = {"index": answer.num_calls, **_call(self._plan.chat.tool_format, part)}
                answer.num_calls += 1
                deltas.append({"tool_calls": [call]})
            else:
                name = "content" if isinstance(part, Text) else "reasoning_content"
                deltas.append({name: part.text})
        return deltas

    def _chunk(self, index: int, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return self._plan.envelope("chat.completion.chunk", [choice])
