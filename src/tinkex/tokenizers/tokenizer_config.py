"""A tokenizer's configuration files: the named special tokens and the chat template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinkex.tokenizers.added_tokens import named_tokens, read_json_object
from tinkex.tokenizers.chat_template import chat_template_of

__all__ = ["TokenizerConfig", "read_tokenizer_config"]


@dataclass(frozen=True)
class TokenizerConfig:
    """The configuration of a tokenizer."""

    special_tokens: Mapping[str, str]
    chat_template: str | None
    raw: Mapping[str, Any] = field(default_factory=dict)
    """The content of ``tokenizer_config.json``."""


def read_tokenizer_config(directory: Path) -> TokenizerConfig:
    """Reads ``tokenizer_config.json``, ``special_tokens_map.json`` and ``chat_template.jinja``, if present."""
    config = read_json_object(directory / "tokenizer_config.json")
    return TokenizerConfig(named_tokens(directory), chat_template_of(directory, config), config)
