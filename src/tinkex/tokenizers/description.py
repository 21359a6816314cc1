"""What lies beside a tokenizer's vocabulary: the named special tokens and the chat template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinkex.added_tokens import read_settings, special_settings
from tinkex.tokenizers.everyday import NAMED_TOKENS

__all__ = ["Description", "describe"]


@dataclass(frozen=True)
class Description:
    """What the files of a tokenizer say about it."""

    special_tokens: Mapping[str, str]
    chat_template: str | None
    config: Mapping[str, Any] = field(default_factory=dict)
    """``tokenizer_config.json`` as it is."""


def describe(directory: Path) -> Description:
    """Reads ``tokenizer_config.json``, ``special_tokens_map.json`` and ``chat_template.jinja``, where they are."""
    config = read_settings(directory / "tokenizer_config.json")
    special = _special_tokens(special_settings(directory))
    return Description(special, _chat_template(directory / "chat_template.jinja", config), config)


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """The named special tokens."""
    found: dict[str, str] = {}
    for name in NAMED_TOKENS:
        value = settings.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _chat_template(file: Path, config: Mapping[str, Any]) -> str | None:
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry.get("name"): entry.get("template") for entry in template}.get("default")
    return template if isinstance(template, str) else None
