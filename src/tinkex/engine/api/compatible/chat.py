"""A chat as a sample: its prompt, what the answer must be, and how the answer is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tinkex.engine.api.compatible.chat_template import END_THINK, Chat, ChatTemplate, is_thinking, render
from tinkex.engine.api.compatible.forced_calls import call_schema
from tinkex.engine.api.compatible.models import ModelChoice
from tinkex.engine.api.compatible.output import OutputParser
from tinkex.engine.api.compatible.samples import encode_text
from tinkex.engine.api.compatible.strict_calls import strict_calls
from tinkex.engine.api.compatible.tool_formats import ToolFormat, need_tool_format
from tinkex.engine.api.field_errors import InvalidField, rename_field
from tinkex.errors import InvalidInput
from tinkex.types import StructuredOutput

ANY_PARAMETERS: Mapping[str, Any] = {"type": "object"}
"""The schema of parameters that need not be valid."""


@dataclass(frozen=True)
class Tool:
    """A function that the model may call; ``parameters`` is the JSON schema of its arguments."""

    name: str
    description: str | None
    parameters: Mapping[str, Any] | None
    strict: bool = False
    """Whether arguments must be valid, also of calls that the model chooses to make."""

    def definition(self) -> Mapping[str, Any]:
        """The tool in the form that templates read."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = dict(self.parameters or {"type": "object", "properties": {}})
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class ToolChoice:
    """Whether the model may or must call a tool, and which one."""

    mode: Literal["auto", "none", "required"] = "auto"
    name: str | None = None


@dataclass(frozen=True)
class ChatOptions:
    """What a request asks for besides its messages."""

    tools: Sequence[Tool] = ()
    choice: ToolChoice = ToolChoice()
    schema: Mapping[str, Any] | Literal[True] | None = None
    """The JSON schema of the answer; True for any JSON object."""
    output: StructuredOutput | None = None
    """The form of the answer, instead of a schema."""
    schema_field: str = "response_format"
    schema_name: str = "json_schema.schema"
    separate_reasoning: bool = True
    choice_field: str = "tool_choice"
    thinking_field: str | None = None
    """The field by which the request enables thinking, if it does."""
    without_thoughts: bool = False
    """Whether the request asks for none."""


@dataclass(frozen=True)
class PreparedChat:
    """A chat that can be sampled."""

    prompt: Sequence[int]
    structured_output: StructuredOutput | None
    tool_format: ToolFormat | None
    thinking: Literal["open", "maybe"] | None
    is_forced: bool
    schema_path: str
    """The field that the structured output was made of."""
    form_field: str
    """The field that asks for a structured output."""

    @property
    def field_names(self) -> Mapping[str, str]:
        """The client's names of native fields."""
        path = self.schema_path
        return {
            "structured_output.json_schema": path,
            "structured_output.grammar": path,
            "structured_output": self.form_field,
            "prompt": "messages",
        }

    def new_parser(self) -> OutputParser:
        """The parser of one answer."""
        return OutputParser(self.thinking, self.tool_format, forced=self.is_forced)


async def prepare(
    model: ModelChoice, template: ChatTemplate, chat: Chat, options: ChatOptions
) -> PreparedChat:
    """The prompt of a chat, and the constraints of its answer; raises :class:`InvalidField`."""
    tool_format = _tool_format(template, options)
    is_forced = tool_format is not None and options.choice.mode == "required"
    form_field = options.schema_field if options.output is None else "structured_output"
    if tool_format is not None and (options.schema is not None or options.output is not None):
        raise InvalidField(
            form_field,
            f"{form_field} with tools: an answer that has a given form cannot call a tool; set {options.choice_field} to none, "
            "or remove one of the two.",
        )
    schema_path = f"{form_field}.{options.schema_name}" if options.output is None else form_field
    schema: Any = options.schema
    if is_forced:
        assert tool_format is not None
        schema, schema_path = call_schema(_forced_tools(options), tool_format), "tools"
        form_field = options.choice_field
    try:
        structured = StructuredOutput(json_schema=schema) if schema is not None else options.output
    except ValueError as error:
        raise InvalidField(schema_path, f"{schema_path}: {error}".replace("StructuredOutput.", "")) from error
    has_form = structured is not None
    if has_form and options.thinking_field is not None:
        raise InvalidField(
            options.thinking_field,
            f"{options.thinking_field} requests thinking, which cannot precede an answer of a given form or a tool call; "
            "remove one of the two.",
        )
    text = await render(model, chat)
    is_open = is_thinking(text)
    if is_open and (has_form or options.without_thoughts):
        text, is_open = f"{text}{END_THINK}\n\n", False  # thinking cannot precede an answer of a given form
    if is_forced and tool_format is not None:
        text += tool_format.forced_prefix
    prompt = await encode_text(model, text, "messages", add_special_tokens=False)
    if len(prompt) > model.max_context:
        raise InvalidField(
            "messages",
            f"messages have {len(prompt):,} tokens, and the context of {model.name} holds {model.max_context:,}; send fewer.",
        )
    thinking: Literal["open", "maybe"] | None = None
    if options.separate_reasoning and not has_form:
        thinking = "open" if is_open else "maybe" if template.knows_thinking else None
    if tool_format is not None and not is_forced and any(tool.strict for tool in options.tools):
        structured = _strict_calls(model, tool_format, options)
        schema_path = form_field = "tools"
    return PreparedChat(prompt, structured, tool_format, thinking, is_forced, schema_path, form_field)


def chat_stop(model: ModelChoice, given: str | Sequence[str] | None) -> Sequence[str | int] | None:
    """What ends an answer: the strings of the request, and the end of a turn where that is not an end of text."""
    strings = [given] if isinstance(given, str) else list(given or ())
    token = model.tokenizer.end_of_turn_id
    if token is None or token in model.tokenizer.eos_token_ids or token >= model.served.info.arch.vocab_size:
        return strings or None  # an empty list never stops in the native API
    if strings:  # the native API takes strings or tokens
        return [*strings, model.tokenizer.decode_bytes([token]).decode("utf-8", "replace")]
    return [token]


def rendered_tools(options: ChatOptions) -> Sequence[Mapping[str, Any]]:
    """The tools in the form that templates read; none if they may not be called."""
    return [] if options.choice.mode == "none" else [tool.definition() for tool in options.tools]


def _tool_format(template: ChatTemplate, options: ChatOptions) -> ToolFormat | None:
    choice = options.choice
    if not options.tools and (choice.mode == "required" or choice.name is not None):
        raise InvalidField(options.choice_field, f"{options.choice_field} needs tools; give some.")
    names = [tool.name for tool in options.tools]
    if choice.name is not None and choice.name not in names:
        raise InvalidField(
            options.choice_field,
            f"{options.choice_field} names {choice.name!r}, which is not one of the tools: {', '.join(names)}.",
        )
    twice = next((name for name, number in Counter(names).items() if number > 1), None)
    if twice is not None:
        raise InvalidField("tools", f"tools has {twice!r} twice; give each function a name of its own.")
    for tool in options.tools:
        kind = (tool.parameters or {}).get("type", "object")
        if kind != "object":
            raise InvalidField(
                "tools",
                f"tools: the parameters of {tool.name!r} have the type {kind!r}; describe them as an object.",
            )
    if not options.tools or choice.mode == "none":
        return None
    if not template.knows_tools:
        raise InvalidField(
            "tools", "tools: the chat template of this model cannot render tools; describe them in a message."
        )
    return need_tool_format(template.tool_format, "tools")


def _strict_calls(model: ModelChoice, tool_format: ToolFormat, options: ChatOptions) -> StructuredOutput:
    tools = [(tool.name, tool.parameters if tool.strict else ANY_PARAMETERS) for tool in options.tools]
    try:
        return strict_calls(tools, tool_format, model.tokenizer)
    except ValueError as error:
        found = rename_field(InvalidInput(str(error)), {"structured_output.json_schema": "tools"})
        raise (
            found if isinstance(found, InvalidField) else InvalidField("tools", f"tools: {error}")
        ) from error


def _forced_tools(options: ChatOptions) -> Sequence[tuple[str, Mapping[str, Any] | None]]:
    name = options.choice.name
    return [(tool.name, tool.parameters) for tool in options.tools if name in {None, tool.name}]
