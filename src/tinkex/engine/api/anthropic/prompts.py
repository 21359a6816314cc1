"""Messages and tools of the Anthropic protocol in the form that chat templates read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from tinkex.engine.api.anthropic.requests import (
    AnthropicMessage,
    Block,
    MessageRequest,
    PromptRequest,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from tinkex.engine.api.compatible import chat as chats
from tinkex.engine.api.compatible.chat import ChatOptions, PreparedChat, prepare, rendered_tools
from tinkex.engine.api.compatible.chat_template import Chat, ChatTemplate, find_template
from tinkex.engine.api.compatible.models import ModelChoice
from tinkex.engine.api.field_errors import InvalidField

SEPARATOR = "\n"
"""What is put between the text blocks of one message."""
ERROR = "Error: "
"""What a tool's result starts with if ``is_error`` is set."""
CHOICES: Mapping[str, Any] = {"auto": "auto", "none": "none", "any": "required", "tool": "required"}


async def prepare_prompt(model: ModelChoice, request: PromptRequest, num_bytes: int) -> PreparedChat:
    """The prompt of a request, and how its answer is read; raises :class:`InvalidField`."""
    template = find_template(model)
    options = _options(request)
    messages, prefill = _messages(template, request)
    chat = Chat(messages, rendered_tools(options), _variables(request, template), prefill, num_bytes)
    return await prepare(model, template, chat, options)


def _options(request: PromptRequest) -> ChatOptions:
    choice = request.tool_choice
    tool_choice = chats.ToolChoice()
    if choice is not None:
        if (choice.type == "tool") != (choice.name is not None):
            raise InvalidField("tool_choice.name", "tool_choice.name belongs to tool_choice.type 'tool'.")
        tool_choice = chats.ToolChoice(CHOICES[choice.type], choice.name)
    form = request.output_config.format if request.output_config is not None else None
    return ChatOptions(
        tools=[
            chats.Tool(tool.name, tool.description, tool.input_schema, bool(tool.strict))
            for tool in request.tools or ()
        ],
        choice=tool_choice,
        schema=form.schema if form is not None else None,
        schema_field="output_config.format",
        schema_name="schema",
        thinking_field=_thinking_field(request),
        without_thoughts=request.thinking is not None and request.thinking.type == "disabled",
    )


def _thinking_field(request: PromptRequest) -> str | None:
    """The field by which a request enables thinking, if it does."""
    if request.thinking is not None and request.thinking.type == "enabled":
        return "thinking.type"
    if request.output_config is not None and request.output_config.effort is not None:
        return "output_config.effort"
    return None


def _variables(request: PromptRequest, template: ChatTemplate) -> Mapping[str, Any]:
    variables: dict[str, Any] = {}
    effort = request.output_config.effort if request.output_config is not None else None
    if effort is not None:
        variables |= template.effort_variables(effort, "output_config.effort")
    thinking = request.thinking
    if thinking is None:
        return variables
    if thinking.type == "disabled":
        if effort is not None:
            raise InvalidField(
                "output_config.effort",
                "output_config.effort contradicts thinking.type 'disabled'; remove one of the two.",
            )
        if template.knows_thinking:
            variables |= template.effort_variables("none", "thinking.type")
    elif not template.knows_thinking:
        raise InvalidField(
            "thinking.type",
            f"thinking.type is {thinking.type!r}, and the chat template of this model does not support thinking; remove it.",
        )
    elif thinking.type == "enabled" and template.switch is not None:
        variables[template.switch] = True
    return variables


def _messages(template: ChatTemplate, request: PromptRequest) -> tuple[list[dict[str, Any]], str]:
    """The messages as a template reads them, and what the answer starts with."""
    if not request.messages:
        raise InvalidField("messages", "messages is empty; give at least one.")
    rendered: list[dict[str, Any]] = []
    if request.system:
        rendered.append({"role": "system", "content": _text(request.system)})
    given = list(request.messages)
    prefill = ""
    if given[-1].role == "assistant":
        prefill = _prefill(given.pop(), f"messages[{len(given)}]")
    for number, message in enumerate(given):
        for each in _split(template, message, f"messages[{number}]"):
            last = rendered[-1] if rendered else None
            if last is not None and each["role"] == "user" and last["role"] == "user":
                last["content"] += SEPARATOR + each["content"]  # consecutive messages are one turn
            else:
                rendered.append(each)
    return rendered, prefill


def _prefill(message: AnthropicMessage, where: str) -> str:
    """The text of a last message of the assistant, which the answer continues."""
    if isinstance(message.content, str):
        return message.content
    blocks = [block for block in message.content if isinstance(block, TextBlock)]
    if len(blocks) != len(message.content):
        raise InvalidField(
            f"{where}.content",
            f"{where}.content: the last message may only be text, which the answer continues.",
        )
    return _text(blocks)


def _split(template: ChatTemplate, message: AnthropicMessage, where: str) -> Iterator[dict[str, Any]]:
    """One message as those of a template, where results of tools are messages of their own."""
    if isinstance(message.content, str):
        yield {"role": message.role, "content": message.content}
        return
    texts: list[TextBlock] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    num_results = 0
    for number, block in enumerate(message.content):
        place = f"{where}.content[{number}]"
        _check_block(template, message.role, block, place)
        match block:
            case TextBlock():
                texts.append(block)
            case ThinkingBlock():
                thoughts.append(block.thinking)
            case ToolUseBlock():
                function = {"name": block.name, "arguments": block.input}
                calls.append({"id": block.id, "type": "function", "function": function})
            case ToolResultBlock():
                num_results += 1
                content = (ERROR if block.is_error else "") + _text(block.content or "")
                yield {"role": "tool", "content": content, "tool_call_id": block.tool_use_id}
    if not texts and num_results:
        return
    rendered: dict[str, Any] = {"role": message.role, "content": _text(texts)}
    if calls:
        rendered["tool_calls"] = calls
    if thoughts:
        rendered["reasoning_content"] = SEPARATOR.join(thoughts)
    yield rendered


def _check_block(template: ChatTemplate, role: str, block: Block, where: str) -> None:
    owner = {ThinkingBlock: "assistant", ToolUseBlock: "assistant", ToolResultBlock: "user"}.get(type(block))
    if owner not in {None, role}:
        raise InvalidField(f"{where}.type", f"{where}.type belongs to messages of the role {owner}.")
    if isinstance(block, ToolUseBlock | ToolResultBlock) and not template.knows_tools:
        raise InvalidField(
            f"{where}.type",
            f"{where}.type: the chat template of this model cannot render tools; send their results as text.",
        )


def _text(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else SEPARATOR.join(block.text for block in content)


def ignored_fields(request: PromptRequest, template: ChatTemplate) -> list[str]:
    """The fields without effect that a client has set."""
    names = []
    if isinstance(request, MessageRequest) and request.metadata is not None:
        names.append("metadata")
    if _has_cache_control(request):
        names.append("cache_control")
    if request.thinking is not None and request.thinking.budget_tokens is not None:
        names.append("thinking.budget_tokens")
    if request.tool_choice is not None and request.tool_choice.disable_parallel_tool_use is not None:
        names.append("tool_choice.disable_parallel_tool_use")
    if any(tool.eager_input_streaming is not None for tool in request.tools or ()):
        names.append("tools.eager_input_streaming")
    contents = [message.content for message in request.messages]
    blocks = [block for content in contents if isinstance(content, list) for block in content]
    thoughts = [block for block in blocks if isinstance(block, ThinkingBlock)]
    if thoughts and not template.renders_thoughts:
        names.append("messages.content.thinking")
    if any(block.signature for block in thoughts):
        names.append("messages.content.signature")
    if any(isinstance(block, ToolUseBlock) and block.caller is not None for block in blocks):
        names.append("messages.content.caller")
    return names


def _has_cache_control(request: PromptRequest) -> bool:
    contents = [message.content for message in request.messages]
    blocks: list[msgspec.Struct] = [request, *(request.tools or ())]
    for content in [*contents, request.system]:
        if isinstance(content, list):
            blocks += content
    blocks += [
        inner
        for block in blocks
        if isinstance(block, ToolResultBlock) and isinstance(block.content, list)
        for inner in block.content
    ]
    return any(getattr(block, "cache_control", None) is not None for block in blocks)
