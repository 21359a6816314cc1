"""Tokenizers: found by model name, loaded once per process, with or without ``transformers``.

Where ``transformers`` is installed its own tokenizer is returned; otherwise, or where ``TINKEX_TOKENIZERS`` is
``light``, a light one over the ``tokenizers`` package with the same everyday methods, which is there at once: importing
``transformers`` takes seconds. The Kimi models have one over ``tiktoken`` in both
cases, because ``transformers`` would run code from the hub for them.
"""

from __future__ import annotations

from tinkex.tokenizers.loading import (
    Tokenizer,
    forget_tokenizers,
    get_tokenizer,
    load_tokenizer,
    prefer_light,
    tokenizer_from_directory,
)
from tinkex.tokenizers.names import hub_name

__all__ = [
    "Tokenizer",
    "forget_tokenizers",
    "get_tokenizer",
    "hub_name",
    "load_tokenizer",
    "prefer_light",
    "tokenizer_from_directory",
]
