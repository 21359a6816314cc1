"""Tokenizers by model name, cached per process, with or without ``transformers``.

If ``transformers`` is installed, its tokenizer is returned; otherwise, or with ``TINKEX_TOKENIZERS=light``, a
``LightTokenizer`` on the ``tokenizers`` package with the same common methods, which loads faster: importing
``transformers`` takes seconds. The Kimi models always use ``tiktoken``, because ``transformers`` would run code from
the hub for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinkex.tokenizers.loading import (
    Tokenizer,
    clear_tokenizer_cache,
    get_tokenizer,
    load_tokenizer,
    prefer_light,
    tokenizer_from_directory,
)
from tinkex.tokenizers.names import hub_name

__all__ = [
    "Tokenizer",
    "clear_tokenizer_cache",
    "get_tokenizer",
    "hub_name",
    "load_tokenizer",
    "prefer_light",
    "tokenizer_from_directory",
]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Loads a name of 0.1, with a ``DeprecationWarning``."""
        if name.startswith("__"):  # the import system looks up __path__
            raise AttributeError(name)
        from tinkex._moved import load_renamed

        return load_renamed(__name__, name)
