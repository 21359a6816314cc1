"""Training data: JSON-lines files, with errors that name the line."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from tinkex.errors import ConfigError

__all__ = [
    "Conversation",
    "Messages",
    "Preference",
    "Prompt",
    "read_conversations",
    "read_preferences",
    "read_prompts",
]

Messages: TypeAlias = list[dict[str, Any]]
T = TypeVar("T")
NUM_SHOWN_PROBLEMS = 5


@dataclass(frozen=True)
class Conversation:
    """A chat that ends with an answer, or a plain prompt with its completion."""

    where: str
    prompt: Messages | str
    answer: str


@dataclass(frozen=True)
class Preference:
    """Two answers to one prompt, the better one first."""

    where: str
    prompt: Messages | str
    chosen: str
    rejected: str


@dataclass(frozen=True)
class Prompt:
    """A prompt to answer; ``fields`` is the whole line, for the reward."""

    where: str
    prompt: Messages | str
    fields: dict[str, Any] = field(default_factory=dict)


def read_conversations(path: Path) -> list[Conversation]:
    """Reads lines with ``messages`` (the last one the assistant's), or with ``prompt`` and ``completion``."""
    return _read(path, _conversation)


def read_preferences(path: Path) -> list[Preference]:
    """Reads lines with ``chosen`` and ``rejected``, strings or messages, and a ``prompt`` unless both start with it."""
    return _read(path, _preference)


def read_prompts(path: Path) -> list[Prompt]:
    """Reads lines with ``prompt`` (a string or messages) or ``messages``; other fields are for the reward."""
    return _read(path, _prompt)


class _InvalidLine(Exception):
    """A line is invalid; the message gives the reason."""


def _read(path: Path, make: Callable[[str, dict[str, Any]], T]) -> list[T]:
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors write a byte order mark
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path}; pass a file with one JSON object per line") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as UTF-8 text ({error})") from error
    found: list[T] = []
    problems: list[str] = []
    # Not splitlines(): JSON strings may contain U+2028 and other Unicode line breaks.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            value = json.loads(line)
            if not isinstance(value, dict):
                raise _InvalidLine("the line is not a JSON object")
            _check_encodable(value)
            found.append(make(where, value))
        except RecursionError:
            problems.append(f"{where}: the JSON is nested too deeply")
        except json.JSONDecodeError as error:
            problems.append(f"{where}: invalid JSON: {error.msg} at column {error.colno}")
        except _InvalidLine as wrong:
            problems.append(f"{where}: {wrong}")
    if problems:
        more = len(problems) - NUM_SHOWN_PROBLEMS
        shown = "\n".join(problems[:NUM_SHOWN_PROBLEMS]) + (f"\n… and {more} more" if more > 0 else "")
        raise ConfigError(f"{len(problems)} invalid line{'s' if len(problems) > 1 else ''}:\n{shown}")
    if not found:
        raise ConfigError(f"{path} contains no examples; it needs one JSON object per line")
    return found


def _conversation(where: str, line: dict[str, Any]) -> Conversation:
    if "messages" in line:
        messages = _messages(line["messages"], "messages")
        if messages[-1]["role"] != "assistant":
            raise _InvalidLine(
                f"the last message has the role {messages[-1]['role']!r}; it must be 'assistant'"
            )
        if len(messages) < 2:
            raise _InvalidLine("there is only an answer: messages need at least two entries")
        return Conversation(where, messages[:-1], _text(messages[-1], "content"))
    if "prompt" in line and "completion" in line:
        return Conversation(where, _parse_prompt(line["prompt"]), _answer(line["completion"], "completion"))
    raise _InvalidLine(f"'messages', or 'prompt' and 'completion', are required; the line has {_names(line)}")


def _preference(where: str, line: dict[str, Any]) -> Preference:
    if "chosen" not in line or "rejected" not in line:
        raise _InvalidLine(f"'chosen' and 'rejected' are required; the line has {_names(line)}")
    chosen, rejected = line["chosen"], line["rejected"]
    if "prompt" in line:
        prompt = _parse_prompt(line["prompt"])
    elif isinstance(chosen, list) and isinstance(rejected, list):
        prompt = _messages(chosen, "chosen")[:-1]
        if not prompt or prompt != _messages(rejected, "rejected")[:-1]:
            raise _InvalidLine(
                "'chosen' and 'rejected' must start with the same messages if there is no 'prompt'"
            )
    else:
        raise _InvalidLine("there is no 'prompt'")
    pair = _answer(chosen, "chosen"), _answer(rejected, "rejected")
    if pair[0] == pair[1]:
        raise _InvalidLine("'chosen' and 'rejected' are equal")
    return Preference(where, prompt, *pair)


def _prompt(where: str, line: dict[str, Any]) -> Prompt:
    name = "prompt" if "prompt" in line else "messages"
    if name not in line:
        raise _InvalidLine(f"'prompt' (or 'messages') is required; the line has {_names(line)}")
    prompt = _parse_prompt(line[name])
    if isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
        raise _InvalidLine("the last message must not have the role 'assistant'")
    return Prompt(where, prompt, line)


def _parse_prompt(value: Any) -> Messages | str:
    if isinstance(value, str):
        if not value:
            raise _InvalidLine("'prompt' is empty")
        return value
    return _messages(value, "prompt")


def _answer(value: Any, name: str) -> str:
    """Returns a string, or the content of the last message, which must be the assistant's."""
    if isinstance(value, str):
        if not value:
            raise _InvalidLine(f"{name!r} is empty")
        return value
    last = _messages(value, name)[-1]
    if last["role"] != "assistant":
        raise _InvalidLine(
            f"the last message of {name!r} has the role {last['role']!r}; it must be 'assistant'"
        )
    return _text(last, "content")


def _messages(value: Any, name: str) -> Messages:
    if not isinstance(value, list) or not value:
        raise _InvalidLine(f"{name!r} must be a string or a list of messages, got {_short(value)}")
    for index, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise _InvalidLine(f"{name!r}[{index}] is not a message: it needs a 'role' and a 'content'")
        _text(message, "content")
    return value


def _text(message: dict[str, Any], name: str) -> str:
    text = message.get(name)
    if not isinstance(text, str):
        raise _InvalidLine(f"the {name} of a message must be a string, got {_short(text)}")
    return text


def _check_encodable(line: dict[str, Any]) -> None:
    """Raises for a lone surrogate, which no tokenizer accepts."""
    try:
        json.dumps(line, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise _InvalidLine(f"it contains the lone surrogate {error.object[error.start]!r}") from None


def _names(line: dict[str, Any]) -> str:
    return ", ".join(sorted(line)) or "nothing"


def _short(value: Any) -> str:
    shown = json.dumps(value, ensure_ascii=False)
    return shown if len(shown) <= 40 else shown[:40] + "…"


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
