"""Prompt files: text, token ids or messages, read alike by every command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeAlias

from tinkex.errors import SetupError

__all__ = ["FORMS", "Prompt", "as_messages", "as_tokens", "read_prompt_file", "read_text_file"]

Prompt: TypeAlias = str | list[int] | list[dict[str, Any]]
"""A text, token ids, or messages."""

FORMS = 'text, or JSON: a list of token ids, {"tokens": […]} or {"messages": […]}'


def read_prompt_file(file: Path) -> Prompt:
    """Returns the prompt in a file, without the newline at the end of a text.

    JSON that has neither the form of token ids nor of messages is text; JSON with ``tokens`` or ``messages`` that are not
    such is a ``SetupError``.
    """
    text = read_text_file(file)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text.removesuffix("\n")
    if _are_tokens(value):
        return list(value)
    if not isinstance(value, dict) or not set(value) & {"tokens", "messages"}:
        return text.removesuffix("\n")
    if set(value) == {"tokens"} and _are_tokens(value["tokens"]):
        return list(value["tokens"])
    if set(value) == {"messages"} and _are_messages(value["messages"]):
        return list(value["messages"])
    raise SetupError(
        f'{file} is neither {{"tokens": [ids]}} nor {{"messages": [{{"role": …, "content": …}}]}}; '
        "fix the file, or give the prompt as text"
    )


def read_text_file(file: Path) -> str:
    """Returns the text of a file; raises ``SetupError`` if it is not readable UTF-8."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"{file} is not a readable UTF-8 file ({error})") from error


def as_tokens(prompt: Prompt) -> list[int] | None:
    """Returns a prompt of token ids, or None for others.

    >>> as_tokens([5, 6]), as_tokens("The sea")
    ([5, 6], None)
    """
    return [item for item in prompt if isinstance(item, int)] if _are_tokens(prompt) else None


def as_messages(prompt: Prompt) -> list[dict[str, Any]] | None:
    """Returns a prompt of messages, or None for others.

    >>> as_messages([{"role": "user", "content": "Where?"}]), as_messages("The sea")
    ([{'role': 'user', 'content': 'Where?'}], None)
    """
    return [item for item in prompt if isinstance(item, dict)] if _are_messages(prompt) else None


def _are_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _are_messages(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, dict) and isinstance(item.get("role"), str) for item in value)
    )
