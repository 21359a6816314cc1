"""Messages and tools of the OpenAI protocol in the form that chat templates read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tinkex.engine.api.compatible.chat import ChatOptions, Tool, ToolChoice
from tinkex.engine.api.compatible.chat_template import ChatTemplate, is_off
from tinkex.engine.api.field_errors import InvalidField
from tinkex.engine.api.openai.parameters import structured_output
from tinkex.engine.api.openai.requests import (
    ChatRequest,
    Content,
    NamedToolChoice,
    OpenAIMessage,
    OpenAIToolCall,
)

ROLES: Mapping[str, str] = {"developer": "system"}
"""Roles under another name in templates."""
SEPARATOR = "\n"
"""What is put between the text parts of one message."""


def template_messages(template: ChatTemplate, messages: Sequence[OpenAIMessage]) -> list[dict[str, Any]]:
    """The messages as a template reads them; raises :class:`InvalidField` for what it cannot express."""
    if not messages:
        raise InvalidField("messages", "messages is empty; give at least one.")
    return [_message(template, message, f"messages[{n}]") for n, message in enumerate(messages)]


def _message(template: ChatTemplate, message: OpenAIMessage, where: str) -> dict[str, Any]:
    if message.content is None and message.role != "assistant":
        raise InvalidField(f"{where}.content", f"{where}.content is missing; it is required.")
    rendered: dict[str, Any] = {
        "role": ROLES.get(message.role, message.role),
        "content": content_text(message.content),
    }
    for name, role in (
        ("tool_calls", "assistant"),
        ("reasoning_content", "assistant"),
        ("tool_call_id", "tool"),
    ):
        if getattr(message, name) is not None and message.role != role:
            raise InvalidField(f"{where}.{name}", f"{where}.{name} belongs to messages of the role {role}.")
    if message.tool_calls or message.role == "tool":
        field = f"{where}.tool_calls" if message.tool_calls else f"{where}.role"
        if not template.knows_tools:
            raise InvalidField(
                field,
                f"{field}: the chat template of this model cannot render tools; send their results as text.",
            )
    if message.tool_calls:
        rendered["tool_calls"] = [
            _call(call, n, f"{where}.tool_calls[{n}]") for n, call in enumerate(message.tool_calls)
        ]
    if message.reasoning_content is not None:
        rendered["reasoning_content"] = message.reasoning_content
    if message.role == "tool":
        if message.tool_call_id is None:
            raise InvalidField(f"{where}.tool_call_id", f"{where}.tool_call_id is missing; it is required.")
        rendered["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        if not template.knows_names:
            raise InvalidField(
                f"{where}.name",
                f"{where}.name: the chat template of this model renders no names; put it into the content.",
            )
        rendered["name"] = message.name
    return rendered


def content_text(content: Content | None) -> str:
    """The text of a message's content."""
    if content is None or isinstance(content, str):
        return content or ""
    return SEPARATOR.join(part.text for part in content)


def _call(call: OpenAIToolCall, number: int, where: str) -> dict[str, Any]:
    if call.index not in {None, number}:
        raise InvalidField(
            f"{where}.index",
            f"{where}.index is {call.index}; calls are in their order, so give {number} or remove it.",
        )
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise InvalidField(
            f"{where}.function.arguments", f"{where}.function.arguments is not JSON ({error})."
        ) from error
    if not isinstance(arguments, dict):
        raise InvalidField(
            f"{where}.function.arguments", f"{where}.function.arguments must be a JSON object."
        )
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.function.name, "arguments": arguments},
    }


def chat_options(request: ChatRequest, template: ChatTemplate) -> ChatOptions:
    """What a request asks for besides its messages; raises :class:`InvalidField`."""
    choice = request.tool_choice
    tool_choice = ToolChoice("auto" if choice is None or isinstance(choice, NamedToolChoice) else choice)
    if isinstance(choice, NamedToolChoice):
        tool_choice = ToolChoice("required", choice.function.name)
    schema, output = _schema(request), structured_output(request)
    if schema is not None and output is not None:
        raise InvalidField(
            "structured_output",
            "structured_output and response_format both give the form of the answer; remove one of the two.",
        )
    if request.separate_reasoning and not template.knows_thinking:
        raise InvalidField(
            "separate_reasoning",
            "separate_reasoning: the chat template of this model does not support thinking; remove it.",
        )
    return ChatOptions(
        tools=[
            Tool(
                each.function.name,
                each.function.description,
                each.function.parameters,
                bool(each.function.strict),
            )
            for each in request.tools or ()
        ],
        choice=tool_choice,
        schema=schema,
        output=output,
        separate_reasoning=request.separate_reasoning is not False,
        thinking_field=_thinking_field(request, template),
        without_thoughts=is_off(request.reasoning_effort),
    )


def _thinking_field(request: ChatRequest, template: ChatTemplate) -> str | None:
    """The field by which a request enables thinking, if it does."""
    if request.reasoning_effort is not None and not is_off(request.reasoning_effort):
        return "reasoning_effort"
    if template.switch is not None and (request.chat_template_kwargs or {}).get(template.switch):
        return f"chat_template_kwargs.{template.switch}"
    return None


def _schema(request: ChatRequest) -> Any:
    form = request.response_format
    if form is None:
        return None
    if form.json_schema is not None and form.type != "json_schema":
        raise InvalidField(
            "response_format.json_schema",
            f"response_format.json_schema belongs to the type json_schema, and the type is {form.type}; change the type, "
            "or remove the schema.",
        )
    if form.type == "text":
        return None
    if form.type == "json_object":
        return True
    if form.json_schema is None:
        raise InvalidField(
            "response_format.json_schema",
            "response_format.json_schema is missing; it is required for json_schema.",
        )
    return form.json_schema.schema if form.json_schema.schema is not None else True


def template_variables(request: ChatRequest, template: ChatTemplate) -> Mapping[str, Any]:
    """The variables of a template that a request sets; raises :class:`InvalidField`."""
    variables = dict(template.check_variables(request.chat_template_kwargs or {}, "chat_template_kwargs"))
    if request.reasoning_effort is not None:
        effort = template.effort_variables(request.reasoning_effort, "reasoning_effort")
        for name, value in effort.items():
            if variables.get(name, value) != value:
                raise InvalidField(
                    f"chat_template_kwargs.{name}",
                    f"chat_template_kwargs.{name} contradicts reasoning_effort; remove one of the two.",
                )
        variables |= effort
    return variables
