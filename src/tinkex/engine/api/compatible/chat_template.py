"""What a model's chat template can express, and the prompt of a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeAlias

from tinkex.engine.api.compatible.models import ModelChoice
from tinkex.engine.api.compatible.samples import MAX_LOOP_CHARS
from tinkex.engine.api.compatible.tool_formats import ToolFormat, find_tool_format
from tinkex.engine.api.field_errors import InvalidField
from tinkex.errors import InvalidInput
from tinkex.tokenizers.chat_template import template_variables

THINK, END_THINK = "<think>", "</think>"
SWITCHES = ("enable_thinking", "thinking")
"""Variables by which templates switch thinking on and off."""
EFFORT = "reasoning_effort"
EFFORTS = ("minimal", "low", "medium", "high")
"""Values of ``reasoning_effort`` for templates that write the value into the prompt."""
RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})
"""Variables that ``chat_template_kwargs`` may not set."""
THOUGHTS = "reasoning_content"
"""Where templates read the thoughts of earlier answers."""
NAMED_MESSAGES = ("message.name", "message['name']", 'message["name"]')

Effort: TypeAlias = str | bool | float


@dataclass(frozen=True)
class ChatTemplate:
    """A model's chat template, and what it reads."""

    source: str
    variables: frozenset[str]
    tool_format: ToolFormat | None

    @property
    def knows_tools(self) -> bool:
        """Whether tools and their results can be rendered."""
        return "tools" in self.variables

    @property
    def switch(self) -> str | None:
        """The variable that switches thinking on and off, if there is one."""
        return next((name for name in SWITCHES if name in self.variables), None)

    @property
    def knows_thinking(self) -> bool:
        """Whether the model thinks before it answers, or can."""
        return self.switch is not None or EFFORT in self.variables or THINK in self.source

    @property
    def efforts(self) -> Sequence[str]:
        """The efforts of reasoning that the template takes: the usual ones, and others that it names."""
        if EFFORT not in self.variables:
            return ()
        named = [
            word
            for word in ("none", "xhigh", "max")
            if f"'{word}'" in self.source or f'"{word}"' in self.source
        ]
        return [*EFFORTS, *named]

    @property
    def renders_thoughts(self) -> bool:
        """Whether thoughts of earlier answers are rendered, if only of the last ones."""
        return THOUGHTS in self.source

    @property
    def knows_names(self) -> bool:
        """Whether the names of participants are rendered."""
        return any(spelling in self.source for spelling in NAMED_MESSAGES)

    def effort_variables(self, effort: Effort, where: str) -> Mapping[str, Any]:
        """The variables for an effort of reasoning; raises :class:`InvalidField`, which lists the values that work."""
        switch = self.switch
        efforts = self.efforts
        if switch is not None and is_off(effort):
            return {switch: False}
        if effort in efforts:
            return {EFFORT: effort}
        if is_off(effort) and THINK in self.source:
            return {}  # the prompt ends the thoughts
        if switch is not None:
            if effort is True or effort == "high":
                return {switch: True}
            raise InvalidField(
                where,
                f"{where} is {effort!r}, and thinking of this model is on or off; use true or 'high', or false or 'none'.",
            )
        if EFFORT in self.variables:
            raise InvalidField(where, f"{where} is {effort!r}; this model takes: {', '.join(efforts)}.")
        raise InvalidField(
            where,
            f"{where} is {effort!r}, and the chat template of this model has no setting for it; remove it.",
        )

    def check_variables(self, given: Mapping[str, Any], where: str) -> Mapping[str, Any]:
        """Variables of the client; raises :class:`InvalidField` for one that the template does not read."""
        allowed = self.variables - RESERVED
        for name in given:
            if name not in allowed:
                reads = ", ".join(sorted(allowed)) or "none"
                raise InvalidField(
                    f"{where}.{name}",
                    f"{where}.{name} is not read by this model's template; it reads: {reads}.",
                )
        return given


@dataclass(frozen=True)
class Chat:
    """A chat to be answered, in the form that templates read."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    prefill: str = ""
    """What the answer starts with; it is part of the prompt."""
    num_bytes: int = 0
    """The size of the request; a large one is rendered on a thread."""


def is_off(effort: Effort | None) -> bool:
    """Whether an effort of reasoning asks for no thoughts."""
    return effort is not None and effort in {False, "none"}


def find_template(model: ModelChoice) -> ChatTemplate:
    """The template of a model; raises :class:`InvalidField` if it has none."""
    source = model.tokenizer.chat_template
    if source is None:
        raise InvalidField(
            "messages",
            f"messages: the model {model.name} has no chat template; send a prompt to completions instead.",
        )
    return _analysed(source)


@lru_cache(maxsize=16)
def _analysed(source: str) -> ChatTemplate:
    variables = template_variables(source)
    return ChatTemplate(source, variables, find_tool_format(source) if "tools" in variables else None)


async def render(model: ModelChoice, chat: Chat) -> str:
    """The prompt of a chat, as text."""
    if chat.num_bytes > MAX_LOOP_CHARS:
        return await model.run_on_thread(lambda: _render(model, chat))
    return _render(model, chat)


def _render(model: ModelChoice, chat: Chat) -> str:
    variables = dict(chat.variables)
    if chat.tools:
        variables["tools"] = list(chat.tools)
    try:
        return model.tokenizer.render_chat_template(chat.messages, **variables) + chat.prefill
    except InvalidInput as error:
        raise InvalidField("messages", f"messages: {error}") from error


def is_thinking(prompt: str) -> bool:
    r"""Whether a prompt ends in the middle of the model's thoughts.

    >>> is_thinking("<|im_start|>assistant\n<think>\n"), is_thinking("<think>\n\n</think>\n\n")
    (True, False)
    """
    return prompt.rfind(THINK) > prompt.rfind(END_THINK) and prompt.rstrip().endswith(THINK)
