"""Requests of the Anthropic protocol. A field is honoured, rejected by its type, or named as one without effect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from tinkex.engine.api.compatible.fields import RequestObject

Json: TypeAlias = dict[str, Any]


class Cached(RequestObject, frozen=True, kw_only=True):
    """A part of a prompt that may be marked for caching, which has no effect: prompts are always cached."""

    cache_control: Json | None = None


class TextBlock(Cached, frozen=True, kw_only=True, tag_field="type", tag="text"):
    """Text."""

    text: str
    citations: None = None


class ThinkingBlock(RequestObject, frozen=True, kw_only=True, tag_field="type", tag="thinking"):
    """Thoughts of an earlier answer."""

    thinking: str
    signature: str = ""


class ToolUseBlock(Cached, frozen=True, kw_only=True, tag_field="type", tag="tool_use"):
    """A tool call of an earlier answer."""

    id: str
    name: str
    input: Json
    caller: Json | None = None


class ToolResultBlock(Cached, frozen=True, kw_only=True, tag_field="type", tag="tool_result"):
    """The result of a tool call."""

    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None


Block: TypeAlias = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock


class AnthropicMessage(RequestObject, frozen=True, kw_only=True):
    """A message of a chat."""

    role: Literal["user", "assistant"]
    content: str | list[Block]


class AnthropicTool(Cached, frozen=True, kw_only=True):
    """A tool that the model may call; tools that a server would run are rejected."""

    name: str
    input_schema: Json
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    eager_input_streaming: bool | None = None
    """A hint that some clients always send, without effect: the input of a call is sent when it is complete."""


class AnthropicToolChoice(RequestObject, frozen=True, kw_only=True):
    """Whether the model may or must call a tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(RequestObject, frozen=True, kw_only=True):
    """Whether the model thinks before it answers."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class OutputFormat(RequestObject, frozen=True, kw_only=True):
    """The form of the answer."""

    type: Literal["json_schema"]
    schema: Json


class OutputConfig(RequestObject, frozen=True, kw_only=True):
    """How the model answers."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class PromptRequest(RequestObject, frozen=True, kw_only=True):
    """``POST /v1/messages/count_tokens``: what makes up the prompt."""

    model: str
    messages: list[AnthropicMessage]
    system: str | list[TextBlock] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: Json | None = None


class MessageRequest(PromptRequest, frozen=True, kw_only=True):
    """``POST /v1/messages``."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Json | None = None


UNSUPPORTED: Mapping[str, str] = {
    "service_tier": "this server has one tier; remove it",
    "container": "remove it",
    "mcp_servers": "call the servers yourself, and offer their functions in tools",
    "context_management": "shorten the messages yourself",
    "inference_geo": "remove it",
    "output_format": "use output_config.format",
    "speed": "remove it",
}
"""What to do instead of using a field of the protocol that is rejected."""
