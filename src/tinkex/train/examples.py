"""Training examples from rows of data, with errors that name the row."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from tinkex.errors import ConfigError
from tinkex.train.layouts import (
    CONVERSATIONS,
    PREFERENCES,
    PROMPTS,
    InvalidRow,
    Layout,
    recognise,
    rename_columns,
    short,
)
from tinkex.train.rows import read_rows

__all__ = [
    "Answer",
    "Conversation",
    "Example",
    "Messages",
    "OtherRecipeError",
    "Preference",
    "Prompt",
    "describe",
    "last_text",
    "read_conversations",
    "read_preferences",
    "read_prompts",
    "split",
]

Messages: TypeAlias = list[dict[str, Any]]
Answer: TypeAlias = str | dict[str, Any]
"""The text of an answer, or the assistant's message where it calls tools."""
T = TypeVar("T")
NUM_SHOWN_PROBLEMS = 5
CHAT_LAYOUTS = frozenset({"messages", "ShareGPT conversations"})


@dataclass(frozen=True)
class Conversation:
    """A chat that ends with an answer, or a plain prompt with its completion."""

    where: str
    prompt: Messages | str
    answer: Answer
    layout: str = ""
    tools: Messages | None = None


@dataclass(frozen=True)
class Preference:
    """Two answers to one prompt, the better one first."""

    where: str
    prompt: Messages | str
    chosen: Answer
    rejected: Answer
    layout: str = ""
    tools: Messages | None = None


@dataclass(frozen=True)
class Prompt:
    """A prompt to answer; ``fields`` is the whole row, for the reward."""

    where: str
    prompt: Messages | str
    fields: dict[str, Any] = field(default_factory=dict)
    layout: str = ""


class OtherRecipeError(ConfigError):
    """No row of the data suits the recipe, and all suit another one."""

    def __init__(self, message: str, recipe: str) -> None:
        super().__init__(f"{message}\nThis is data for the recipe {recipe}.")
        self.recipe = recipe


Example: TypeAlias = Conversation | Preference | Prompt


def read_conversations(source: Path, columns: Mapping[str, str] | None = None) -> list[Conversation]:
    """Reads chats whose last message is the assistant's, or prompts with their completions; see :mod:`.layouts`."""
    return _read(source, columns, CONVERSATIONS, _conversation)


def read_preferences(source: Path, columns: Mapping[str, str] | None = None) -> list[Preference]:
    """Reads ``chosen`` and ``rejected`` answers, strings or messages, and a ``prompt`` unless both start with it."""
    return _read(source, columns, PREFERENCES, _preference)


def read_prompts(source: Path, columns: Mapping[str, str] | None = None) -> list[Prompt]:
    """Reads prompts (a string or messages); other columns are for the reward."""
    return _read(source, columns, PROMPTS, _prompt)


def describe(examples: Sequence[Example]) -> str:
    """Returns the layouts of the examples, for messages.

    >>> describe([Prompt("a:1", "Hi", layout="question"), Prompt("a:2", "Ho", layout="question")])
    'question'
    """
    return ", ".join(dict.fromkeys(one.layout for one in examples))


def last_text(prompt: Messages | str) -> str:
    """Returns the text of a prompt: the text itself, or the last message of a chat.

    >>> last_text([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}])
    'Hi'
    """
    if isinstance(prompt, str):
        return prompt
    last: Mapping[str, Any] = prompt[-1]
    return str(last["content"])


def _read(
    source: Path,
    columns: Mapping[str, str] | None,
    layouts: Sequence[Layout],
    make: Callable[[str, str, dict[str, Any]], T],
) -> list[T]:
    found: list[T] = []
    problems: dict[str, list[str]] = {}  # where each of them is
    other_recipes: set[str | None] = set()
    for row in read_rows(source):
        layout = ""
        try:
            if row.problem is not None:
                raise InvalidRow(row.problem)
            layout, fields = recognise(rename_columns(row.fields, columns or {}), layouts)
            found.append(make(row.where, layout, fields))
        except InvalidRow as wrong:
            problem = str(wrong)
            if layout and _names_no_column(problem, row.fields):
                problem += f" (the row has {layout})"
            problems.setdefault(problem, []).append(row.where)
            other_recipes.add(wrong.other_recipe)
    if problems:
        message = _describe_problems(problems)
        if not found and len(other_recipes) == 1 and (recipe := other_recipes.pop()) is not None:
            raise OtherRecipeError(message, recipe)
        raise ConfigError(message)
    if not found:
        raise ConfigError(f"{source} contains no examples; it needs at least one row")
    return found


def _names_no_column(problem: str, row: Mapping[str, Any]) -> bool:
    """Returns whether a problem is that of a column which the row has under another name.

    >>> _names_no_column("'prompt' is empty", {"question": ""}), _names_no_column("'prompt' is empty", {"prompt": ""})
    (True, False)
    """
    parts = problem.split("'")
    return len(parts) > 2 and not parts[0] and parts[1] not in row


def _describe_problems(problems: Mapping[str, Sequence[str]]) -> str:
    """Returns the problems, each once with the lines that have it.

    >>> print(_describe_problems({"prompt is empty": ["a.jsonl:1", "a.jsonl:7", "a.jsonl:9"]}))
    3 invalid lines:
    a.jsonl:1 and 2 more lines: prompt is empty
    """
    number = sum(map(len, problems.values()))
    lines = [f"{number} invalid line{'s' if number > 1 else ''}:"]
    for problem, places in list(problems.items())[:NUM_SHOWN_PROBLEMS]:
        more = len(places) - 1
        others = f" and {more} more line{'s' if more > 1 else ''}" if more else ""
        lines.append(f"{places[0]}{others}: {problem}")
    shown = sum(map(len, list(problems.values())[:NUM_SHOWN_PROBLEMS]))
    return "\n".join([*lines, *([f"… and {number - shown} more"] if number > shown else [])])


def _conversation(where: str, layout: str, line: dict[str, Any]) -> Conversation:
    tools = _tools(line.get("tools"))
    if layout not in CHAT_LAYOUTS:
        prompt, answer = _parse_prompt(line["prompt"]), _answer(line["completion"], "completion")
        return Conversation(where, prompt, answer, layout, tools)
    messages = _messages(line["messages"], "messages")
    if messages[-1]["role"] != "assistant":
        raise InvalidRow(f"the last message has the role {messages[-1]['role']!r}; it must be 'assistant'")
    if len(messages) < 2:
        raise InvalidRow("there is only an answer: messages need at least two entries")
    return Conversation(where, messages[:-1], _answer_of(messages[-1]), layout, tools)


def _preference(where: str, layout: str, line: dict[str, Any]) -> Preference:
    chosen, rejected = line["chosen"], line["rejected"]
    if "prompt" in line:
        prompt = _parse_prompt(line["prompt"])
    elif isinstance(chosen, list) and isinstance(rejected, list):
        prompt = _messages(chosen, "chosen")[:-1]
        if not prompt or prompt != _messages(rejected, "rejected")[:-1]:
            raise InvalidRow(
                "'chosen' and 'rejected' must start with the same messages if there is no 'prompt'"
            )
    else:
        raise InvalidRow(
            "there is no 'prompt'; add that column, name yours with --columns prompt=…, or write 'chosen' and 'rejected' as "
            "messages that start with the prompt"
        )
    pair = _answer(chosen, "chosen"), _answer(rejected, "rejected")
    if pair[0] == pair[1]:
        raise InvalidRow("'chosen' and 'rejected' are equal")
    return Preference(where, prompt, *pair, layout, _tools(line.get("tools")))


def _prompt(where: str, layout: str, line: dict[str, Any]) -> Prompt:
    prompt = _parse_prompt(line["messages" if layout in CHAT_LAYOUTS else "prompt"])
    if isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
        raise InvalidRow("the last message must not have the role 'assistant'")
    return Prompt(where, prompt, line, layout)


def _parse_prompt(value: Any) -> Messages | str:
    if isinstance(value, str):
        if not value:
            raise InvalidRow("'prompt' is empty")
        return value
    return _messages(value, "prompt")


def _answer(value: Any, name: str) -> Answer:
    """Returns a string, or the last message, which must be the assistant's."""
    if isinstance(value, str):
        if not value:
            raise InvalidRow(f"{name!r} is empty")
        return value
    last = _messages(value, name)[-1]
    if last["role"] != "assistant":
        raise InvalidRow(
            f"the last message of {name!r} has the role {last['role']!r}; it must be 'assistant'"
        )
    return _answer_of(last)


def _answer_of(message: dict[str, Any]) -> Answer:
    """Returns the text of an answer; one with tool calls is kept as a message, for the chat template."""
    return message if message.get("tool_calls") else _text(message, "content")


def _tools(value: Any) -> Messages | None:
    """Returns the tools that a chat may call, from a list or its JSON."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value else None
        except ValueError as error:
            raise InvalidRow(f"'tools' is not valid JSON ({error})") from error
    if value is None or value == []:
        return None
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise InvalidRow(f"'tools' must be a list of tool definitions, got {short(value)}")
    return value


def _messages(value: Any, name: str) -> Messages:
    if not isinstance(value, list) or not value:
        raise InvalidRow(f"{name!r} must be a string or a list of messages, got {short(value)}")
    for index, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InvalidRow(f"{name!r}[{index}] is not a message: it needs a 'role' and a 'content'")
        _check_content(message)
    return [
        {"content": "", **{key: item for key, item in message.items() if item is not None}}
        for message in value
    ]


def _check_content(message: dict[str, Any]) -> None:
    calls = message.get("tool_calls")
    if calls is None or calls == []:
        _text(message, "content")
    elif message["role"] != "assistant" or not isinstance(calls, list):
        raise InvalidRow(f"'tool_calls' must be a list in an assistant message, got {short(calls)}")


def _text(message: dict[str, Any], name: str) -> str:
    text = message.get(name)
    if not isinstance(text, str):
        raise InvalidRow(f"the {name} of a message must be a string, got {short(text)}")
    return text


def split(examples: Sequence[T], fraction: float, seed: int) -> tuple[list[T], list[T]]:
    """Splits into training and evaluation examples; of ten or more, at least one is for evaluation.

    >>> learn, check = split(list(range(20)), 0.1, seed=0)
    >>> len(learn), len(check)
    (18, 2)
    """
    import random

    num_held_out = round(len(examples) * fraction)
    if num_held_out == 0 and fraction > 0 and len(examples) >= 10:
        num_held_out = 1
    order = list(range(len(examples)))
    random.Random(f"split:{seed}").shuffle(order)  # noqa: S311 -- repeatable on purpose
    held_out = set(order[:num_held_out])
    learn = [one for index, one in enumerate(examples) if index not in held_out]
    return learn, [one for index, one in enumerate(examples) if index in held_out]
