"""Requests of the OpenAI protocol. A field is honoured, rejected by its type, or in ``IGNORED``; None is its default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from tinkex.engine.api.compatible.fields import RequestObject

IGNORED = ("user", "metadata", "store")
"""Fields of completions that are accepted without effect."""
IGNORED_IN_CHATS = (*IGNORED, "parallel_tool_calls")

Json: TypeAlias = dict[str, Any]


class StreamOptions(RequestObject, frozen=True, kw_only=True):
    """Options of a stream."""

    include_usage: bool | None = None


class OutputForm(RequestObject, frozen=True, kw_only=True):
    """The form of an answer as in the native API: one of a JSON schema, a regular expression and a Lark grammar."""

    json_schema: Json | bool | None = None
    regex: str | None = None
    grammar: str | None = None


class SamplingFields(RequestObject, frozen=True, kw_only=True):
    """What both routes have in common."""

    model: str
    n: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    structured_output: OutputForm | None = None
    return_token_ids: bool | None = None
    user: str | None = None
    metadata: Json | None = None
    store: bool | None = None


class CompletionRequest(SamplingFields, frozen=True, kw_only=True):
    """``POST /completions``."""

    prompt: str | list[str | int | list[int]]
    max_tokens: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    best_of: None = None
    suffix: None = None


class TextPart(RequestObject, frozen=True, kw_only=True, tag_field="type", tag="text"):
    """A part of a message's content; images, audio and files are rejected, because models read text."""

    text: str


Content: TypeAlias = str | list[TextPart]


class FunctionCall(RequestObject, frozen=True, kw_only=True):
    """The function of a tool call in the history; ``arguments`` is JSON."""

    name: str
    arguments: str


class OpenAIToolCall(RequestObject, frozen=True, kw_only=True):
    """A tool call in the history."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"
    index: int | None = None


class OpenAIMessage(RequestObject, frozen=True, kw_only=True):
    """A message of a chat. ``refusal``, ``audio`` and the like are null in answers that are sent back."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: list[OpenAIToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: list[None] | None = None


class Function(RequestObject, frozen=True, kw_only=True):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class OpenAITool(RequestObject, frozen=True, kw_only=True):
    """A tool that the model may call."""

    function: Function
    type: Literal["function"]


class NamedFunction(RequestObject, frozen=True, kw_only=True):
    """The name of a function."""

    name: str


class NamedToolChoice(RequestObject, frozen=True, kw_only=True):
    """The one tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class JsonSchema(RequestObject, frozen=True, kw_only=True):
    """The schema of an answer; it is enforced whether or not it is ``strict``."""

    name: str
    schema: Json | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(RequestObject, frozen=True, kw_only=True):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatRequest(SamplingFields, frozen=True, kw_only=True):
    """``POST /chat/completions``."""

    messages: list[OpenAIMessage]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[OpenAITool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: str | bool | float | None = None
    separate_reasoning: bool | None = None
    chat_template_kwargs: Json | None = None
    functions: None = None
    function_call: None = None
    modalities: None = None
    audio: None = None
    prediction: None = None
    service_tier: None = None
    verbosity: None = None
    web_search_options: None = None
    prompt_cache_key: None = None
    safety_identifier: None = None


_NO_EFFECT = "this server has nothing that it would change; remove it"
UNSUPPORTED: Mapping[str, str] = {
    "best_of": "request n completions and choose among them by their logprobs",
    "suffix": "models continue a text and do not fill in; put it into the prompt",
    "functions": "use tools",
    "function_call": "use tool_choice, and tool_calls in messages",
    "modalities": "answers are text; remove it",
    "audio": "answers are text; remove it",
    "prediction": "remove it",
    "service_tier": _NO_EFFECT,
    "verbosity": "ask for short or long answers in a message",
    "web_search_options": "offer a search function of yours in tools",
    "prompt_cache_key": "prompts are cached for each user by themselves; remove it",
    "safety_identifier": _NO_EFFECT,
    "max_new_tokens": "use max_tokens",
    "guided_json": "use structured_output.json_schema",
    "guided_regex": "use structured_output.regex",
    "guided_grammar": "use structured_output.grammar",
    "structured_outputs": "use structured_output",
    "stop_token_ids": "use stop with strings, or the native API for token ids",
    "prompt_chunks": "models of this server read text; send token ids as the prompt",
}
"""What to do instead of using a field of the protocol, or of other servers, that is rejected."""
