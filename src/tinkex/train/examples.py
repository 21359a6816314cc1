"""Training data: files of JSON lines, read with errors that name the line."""

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
SHOWN_PROBLEMS = 5


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
    """Lines with ``messages`` (the last one the assistant's), or with ``prompt`` and ``completion``."""
    return _read(path, _conversation)


def read_preferences(path: Path) -> list[Preference]:
    """Lines with ``chosen`` and ``rejected``, texts or messages, and a ``prompt`` unless both begin with it."""
    return _read(path, _preference)


def read_prompts(path: Path) -> list[Prompt]:
    """Lines with ``prompt`` (text or messages) or ``messages``; other fields are for the reward."""
    return _read(path, _prompt)


class _Wrong(Exception):
    """What is wrong with a line."""


def _read(path: Path, make: Callable[[str, dict[str, Any]], T]) -> list[T]:
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors begin files with a mark
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path}; give a file with one JSON object per line") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as UTF-8 text ({error})") from error
    found: list[T] = []
    problems: list[str] = []
    # Not splitlines(): JSON texts may hold U+2028 and its like.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            value = json.loads(line)
            if not isinstance(value, dict):
                raise _Wrong("the line is no JSON object")
            _check_letters(value)
            found.append(make(where, value))
        except RecursionError:
            problems.append(f"{where}: the JSON is too deep")
        except json.JSONDecodeError as error:
            problems.append(f"{where}: no JSON: {error.msg} at column {error.colno}")
        except _Wrong as wrong:
            problems.append(f"{where}: {wrong}")
    if problems:
        more = len(problems) - SHOWN_PROBLEMS
        shown = "\n".join(problems[:SHOWN_PROBLEMS]) + (f"\n… and {more} more" if more > 0 else "")
        raise ConfigError(f"{len(problems)} line{'s' if len(problems) > 1 else ''} cannot be used:\n{shown}")
    if not found:
        raise ConfigError(f"{path} holds no examples; it needs one JSON object per line")
    return found


def _conversation(where: str, line: dict[str, Any]) -> Conversation:
    if "messages" in line:
        messages = _messages(line["messages"], "messages")
        if messages[-1]["role"] != "assistant":
            raise _Wrong(
                f"the last of the messages is the {messages[-1]['role']}'s; it must be the assistant's"
            )
        if len(messages) < 2:
            raise _Wrong("there is an answer and no question: messages need at least two entries")
        return Conversation(where, messages[:-1], _text(messages[-1], "content"))
    if "prompt" in line and "completion" in line:
        return Conversation(where, _asked(line["prompt"]), _answer(line["completion"], "completion"))
    raise _Wrong(f"there is neither 'messages' nor 'prompt' and 'completion'; it has {_names(line)}")


def _preference(where: str, line: dict[str, Any]) -> Preference:
    if "chosen" not in line or "rejected" not in line:
        raise _Wrong(f"'chosen' and 'rejected' are needed; it has {_names(line)}")
    chosen, rejected = line["chosen"], line["rejected"]
    if "prompt" in line:
        asked = _asked(line["prompt"])
    elif isinstance(chosen, list) and isinstance(rejected, list):
        asked = _messages(chosen, "chosen")[:-1]
        if not asked or asked != _messages(rejected, "rejected")[:-1]:
            raise _Wrong(
                "'chosen' and 'rejected' must begin with the same messages where there is no 'prompt'"
            )
    else:
        raise _Wrong("there is no 'prompt'")
    pair = _answer(chosen, "chosen"), _answer(rejected, "rejected")
    if pair[0] == pair[1]:
        raise _Wrong("'chosen' and 'rejected' are the same, so there is nothing to prefer")
    return Preference(where, asked, *pair)


def _prompt(where: str, line: dict[str, Any]) -> Prompt:
    name = "prompt" if "prompt" in line else "messages"
    if name not in line:
        raise _Wrong(f"there is no 'prompt' (or 'messages'); it has {_names(line)}")
    asked = _asked(line[name])
    if isinstance(asked, list) and asked[-1]["role"] == "assistant":
        raise _Wrong("the last message is the assistant's, so there is nothing to answer")
    return Prompt(where, asked, line)


def _asked(value: Any) -> Messages | str:
    if isinstance(value, str):
        if not value:
            raise _Wrong("'prompt' is empty")
        return value
    return _messages(value, "prompt")


def _answer(value: Any, name: str) -> str:
    """A text, or messages whose last one is the assistant's."""
    if isinstance(value, str):
        if not value:
            raise _Wrong(f"{name!r} is empty")
        return value
    last = _messages(value, name)[-1]
    if last["role"] != "assistant":
        raise _Wrong(f"the last message of {name!r} is the {last['role']}'s; it must be the assistant's")
    return _text(last, "content")


def _messages(value: Any, name: str) -> Messages:
    if not isinstance(value, list) or not value:
        raise _Wrong(f"{name!r} is a text or a list of messages, got {_short(value)}")
    for place, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise _Wrong(f"{name!r}[{place}] is no message: it needs a 'role' and a 'content'")
        _text(message, "content")
    return value


def _text(message: dict[str, Any], name: str) -> str:
    text = message.get(name)
    if not isinstance(text, str):
        raise _Wrong(f"the {name} of a message is a text, got {_short(text)}")
    return text


def _check_letters(line: dict[str, Any]) -> None:
    """Half of a pair of escapes is no letter, and no tokenizer takes it."""
    try:
        json.dumps(line, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise _Wrong(f"it holds {error.object[error.start]!r}, half of a pair of escapes") from None


def _names(line: dict[str, Any]) -> str:
    return ", ".join(sorted(line)) or "nothing"


def _short(value: Any) -> str:
    shown = json.dumps(value, ensure_ascii=False)
    return shown if len(shown) <= 40 else shown[:40] + "…"


def split(examples: Sequence[T], fraction: float, seed: int) -> tuple[list[T], list[T]]:
    """The examples to train on, and those to evaluate on: at least one of these from ten examples on.

    >>> learn, check = split(list(range(20)), 0.1, seed=0)
    >>> len(learn), len(check)
    (18, 2)
    """
    import random

    held = round(len(examples) * fraction)
    if held == 0 and fraction > 0 and len(examples) >= 10:
        held = 1
    order = list(range(len(examples)))
    random.Random(f"split:{seed}").shuffle(order)  # noqa: S311 -- repeatable on purpose
    chosen = set(order[:held])
    learn = [one for place, one in enumerate(examples) if place not in chosen]
    return learn, [one for place, one in enumerate(examples) if place in chosen]
