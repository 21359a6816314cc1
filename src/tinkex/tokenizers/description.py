"""What lies beside a tokenizer's vocabulary: the named special tokens and the chat template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinkex.tokenizers.added_tokens import named_tokens, read_settings
from tinkex.tokenizers.chat_template import chat_template_of

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
    return Description(named_tokens(directory), chat_template_of(directory, config), config)
