"""How models write tool calls: the formats of Hermes and Qwen, of Llama 3, and of Mistral."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from tinkex.engine.api.field_errors import InvalidField


@dataclass(frozen=True)
class ToolCall:
    """A call: the name of the function, and its arguments as JSON."""

    name: str
    arguments: str


@dataclass(frozen=True)
class ToolFormat:
    """One way of writing calls."""

    name: str
    start: str
    """What a call starts with."""
    end: str | None
    """What it ends with; None if calls are the rest of the answer."""
    arguments: str
    """The name of the arguments in a call."""
    forced_prefix: str
    """What is put into the prompt if a call is required, so that its JSON follows."""
    only_at_start: bool = False
    """Whether an answer is either calls or text."""

    def parse(self, text: str) -> Sequence[ToolCall] | None:
        """The calls in ``text``, from after ``start`` to before ``end``; None if it is not what a call looks like."""
        try:
            calls = self._parse(text)
        except (ValueError, RecursionError):
            return None
        return calls or None

    def _parse(self, text: str) -> Sequence[ToolCall]:
        text = text.strip()
        if self is MISTRAL and not text.startswith(("[", "{")):
            return [self._named(part) for part in text.split(self.start)]
        values = _objects(text, ";") if self.only_at_start else _flat(_decode(text))
        return [self._call(value) for value in values]

    def _call(self, value: Any) -> ToolCall:
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            raise ValueError("not a call")
        given = value.get(self.arguments, value.get("arguments", {}))
        given = _decode(given) if isinstance(given, str) else given
        if not isinstance(given, dict):
            raise ValueError("the arguments of a call are an object")
        return ToolCall(value["name"], json.dumps(given, ensure_ascii=False))

    def _named(self, text: str) -> ToolCall:
        """A call of the newer format of Mistral, ``name[ARGS]{…}``."""
        found = _NAMED.fullmatch(text.strip())
        if found is None:
            raise ValueError("not a call")
        return self._call({"name": found[1], self.arguments: found[2]})


_NAMED = re.compile(r"([\w.-]+)(?:\[CALL_ID\][\w-]*)?(?:\[ARGS\])?\s*(\{.*\})", re.DOTALL)

HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>", "arguments", "<tool_call>\n")
LLAMA3 = ToolFormat("llama3", "{", None, "parameters", "", only_at_start=True)
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", None, "arguments", "[TOOL_CALLS][")
PYTHON_TAG = "<|python_tag|>"
"""What some answers of Llama 3 start with before the call."""
_OTHER_FORMATS = (
    "<function=",
    "<arg_key>",
    "<invoke",
    "<|tool_call",
    "<TOOLCALL>",
    "<tool_calls",
    "\u2581call",
)
"""What templates of formats have that are not parsed: those of Qwen3-Coder, GLM, MiniMax, Phi, Nemotron, DeepSeek and others."""


def find_tool_format(template: str) -> ToolFormat | None:
    """The format that a chat template teaches its model, or None if it is another one.

    >>> find_tool_format("… within <tool_call></tool_call> XML tags …").name
    'hermes'
    """
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    if any(marker in template for marker in _OTHER_FORMATS):
        return None
    if "<tool_call>" in template:
        return HERMES
    return LLAMA3 if PYTHON_TAG in template or '"parameters"' in template else None


def new_call_id(found: ToolFormat | None, prefix: str) -> str:
    """An id for a call; templates of Mistral accept nine letters and digits only.

    >>> len(new_call_id(MISTRAL, "call_")), len(new_call_id(HERMES, "call_"))
    (9, 29)
    """
    return secrets.token_hex(5)[:9] if found is MISTRAL else f"{prefix}{secrets.token_hex(12)}"


def need_tool_format(found: ToolFormat | None, where: str) -> ToolFormat:
    """The format; raises :class:`InvalidField` if the template teaches one that is not supported."""
    if found is None:
        raise InvalidField(
            where,
            f"{where}: the chat template of this model has a format of tool calls that this server does not parse; describe the "
            "tools in a message, and parse the answer.",
        )
    return found


def _objects(text: str, separator: str) -> Sequence[Any]:
    """JSON values one after the other."""
    values, place = [], 0
    while place < len(text):
        value, place = _DECODER.raw_decode(text, place)
        values.append(value)
        while place < len(text) and (text[place].isspace() or text[place] == separator):
            place += 1
    return values


def _flat(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else [value]


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_reject_constant)


def _decode(text: str) -> Any:
    return _DECODER.decode(text)
