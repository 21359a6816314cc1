"""Layouts of training data: the columns that people use, recognised and renamed to one form per recipe."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["CONVERSATIONS", "PREFERENCES", "PROMPTS", "InvalidRow", "Layout", "recognise", "rename_columns"]

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
         "model": "assistant", "system": "system", "tool": "tool", "observation": "tool"}  # fmt: skip
"""Speakers of ShareGPT conversations, by role."""

Fields = dict[str, Any]


class InvalidRow(Exception):
    """A row is invalid; the message gives the reason, and ``other_recipe`` the recipe that could use the row."""

    def __init__(self, message: str, *, other_recipe: str | None = None) -> None:
        super().__init__(message)
        self.other_recipe = other_recipe


@dataclass(frozen=True)
class Layout:
    """A usual set of columns, and the columns of its canonical form."""

    name: str
    required: tuple[str, ...]
    convert: Callable[[Fields], Fields] = lambda row: row


def _renamed(**names: str) -> Callable[[Fields], Fields]:
    return lambda row: {**row, **{name: row[column] for name, column in names.items()}}


def _from_instruction(row: Fields) -> Fields:
    instruction, context = row["instruction"], row.get("input")
    return {**row, "prompt": f"{instruction}\n\n{context}" if context else instruction}


def _alpaca(row: Fields) -> Fields:
    return {**_from_instruction(row), "completion": row["output"]}


def _sharegpt(row: Fields) -> Fields:
    messages = _as_list(row["conversations"], "conversations")
    if all(isinstance(one, dict) and "role" in one for one in messages):
        return {**row, "messages": messages}
    converted = []
    for index, one in enumerate(messages):
        speaker = one.get("from") if isinstance(one, dict) else None
        if not isinstance(speaker, str) or speaker not in ROLES:
            raise InvalidRow(
                f"'conversations'[{index}] needs 'from' (one of {', '.join(ROLES)}) and 'value'; got {short(one)}"
            )
        converted.append({"role": ROLES[speaker], "content": one.get("value")})
    if row.get("system") and (not converted or converted[0]["role"] != "system"):
        converted.insert(0, {"role": "system", "content": row["system"]})
    return {**row, "messages": converted}


def _messages(row: Fields) -> Fields:
    return {**row, "messages": _as_list(row["messages"], "messages")}


CONVERSATIONS: Sequence[Layout] = (
    Layout("messages", ("messages",), _messages),
    Layout("ShareGPT conversations", ("conversations",), _sharegpt),
    Layout("prompt/completion", ("prompt", "completion")),
    Layout("prompt/response", ("prompt", "response"), _renamed(completion="response")),
    Layout("instruction/input/output", ("instruction", "output"), _alpaca),
    Layout("question/answer", ("question", "answer"), _renamed(prompt="question", completion="answer")),
)
PREFERENCES: Sequence[Layout] = (
    Layout("prompt/chosen/rejected", ("prompt", "chosen", "rejected")),
    Layout("question/chosen/rejected", ("question", "chosen", "rejected"), _renamed(prompt="question")),
    Layout(
        "instruction/input/chosen/rejected",
        ("instruction", "chosen", "rejected"),
        _from_instruction,
    ),
    Layout("chosen/rejected", ("chosen", "rejected")),
)
PROMPTS: Sequence[Layout] = (
    Layout("prompt", ("prompt",)),
    Layout("messages", ("messages",), _messages),
    Layout("question", ("question",), _renamed(prompt="question")),
    Layout("instruction/input", ("instruction",), _from_instruction),
)


def recognise(row: Fields, layouts: Sequence[Layout]) -> tuple[str, Fields]:
    """Returns the name of the layout of a row, and the row in canonical form; case and spaces around names do not matter.

    >>> recognise({"question": "2+2?", "answer": "4"}, CONVERSATIONS)[1]["completion"]
    '4'
    """
    named = {**{name.strip().lower(): value for name, value in row.items()}, **row}
    for layout in layouts:
        if all(name in named for name in layout.required):
            return layout.name, layout.convert(named)
    known = "; ".join(layout.name for layout in layouts)
    has = ", ".join(sorted(row)) or "none"
    message = f"the columns are not recognised: it has {has}. Expected: {known}. Map others with --columns."
    raise InvalidRow(message, other_recipe=_recipe_of(named))


def _recipe_of(row: Fields) -> str | None:
    """Returns the recipe that these columns are usual for."""
    recipes = {"dpo": PREFERENCES, "sft": CONVERSATIONS, "grpo": PROMPTS}
    for recipe, layouts in recipes.items():
        if any(all(name in row for name in layout.required) for layout in layouts):
            return recipe
    return None


def rename_columns(row: Fields, columns: Mapping[str, str]) -> Fields:
    """Returns the row with columns under the names of a layout: ``{"prompt": "title"}`` reads prompts from ``title``.

    >>> rename_columns({"title": "Hi"}, {"prompt": "title"})["prompt"]
    'Hi'
    """
    missing = [column for column in columns.values() if column not in row]
    if missing:
        has = ", ".join(sorted(row)) or "none"
        raise InvalidRow(f"there is no column {missing[0]!r}, which --columns names; it has {has}")
    return {**row, **{name: row[column] for name, column in columns.items()}}


def short(value: Any) -> str:
    """Returns a value as JSON, shortened for messages."""
    shown = json.dumps(value, ensure_ascii=False, default=str)
    return shown if len(shown) <= 40 else shown[:40] + "…"


def _as_list(value: Any, name: str) -> Any:
    """Returns a list that a CSV cell holds as JSON, or that a dataset holds as columns; other values unchanged."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            return json.loads(value)
        except ValueError as error:
            raise InvalidRow(f"{name!r} is not valid JSON ({error})") from error
    if isinstance(value, dict) and value and all(isinstance(column, list) for column in value.values()):
        return [dict(zip(value, cells, strict=True)) for cells in zip(*value.values(), strict=True)]
    return value
