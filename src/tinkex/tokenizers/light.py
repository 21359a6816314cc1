"""A tokenizer on the ``tokenizers`` package, without ``transformers``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tinkex.errors import SetupError
from tinkex.tokenizers.added_tokens import add_configured_tokens
from tinkex.tokenizers.base import BaseTokenizer
from tinkex.tokenizers.tokenizer_config import TokenizerConfig, read_tokenizer_config

if TYPE_CHECKING:
    import tokenizers

__all__ = ["LightTokenizer"]


class LightTokenizer(BaseTokenizer):
    """A tokenizer with the common methods of a ``transformers`` tokenizer.

    Create one with :meth:`from_directory`; ``encode``, ``decode``, ``apply_chat_template`` and the special
    tokens work as in ``transformers``.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
        name_or_path: str = "",
    ) -> None:
        super().__init__(
            special_tokens=special_tokens, chat_template=chat_template, name_or_path=name_or_path
        )
        self.backend_tokenizer = backend

    @classmethod
    def from_directory(cls, directory: Path) -> LightTokenizer:
        """Reads ``tokenizer.json``, and added tokens, special tokens and the chat template from the files next to it."""
        import tokenizers

        file = directory / "tokenizer.json"
        if not file.is_file():
            raise SetupError(
                f"{directory} has no tokenizer.json; save the model's fast tokenizer there, "
                "or install transformers to read other formats"
            )
        config: TokenizerConfig = read_tokenizer_config(directory)
        backend = tokenizers.Tokenizer.from_file(str(file))
        add_configured_tokens(backend, directory)
        return cls(
            backend,
            special_tokens=config.special_tokens,
            chat_template=config.chat_template,
            name_or_path=str(directory),
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of a text, by default with the special tokens that the model adds."""
        return list(self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def tokenize(self, text: str) -> list[str]:
        """Splits a text into tokens, without adding special tokens."""
        return list(self.backend_tokenizer.encode(text, add_special_tokens=False).tokens)

    def get_vocab(self) -> dict[str, int]:
        """Returns all tokens with their ids."""
        return dict(self.backend_tokenizer.get_vocab(with_added_tokens=True))

    def get_added_vocab(self) -> dict[str, int]:
        """Returns the tokens added to the trained vocabulary, with their ids."""
        added = self.backend_tokenizer.get_added_tokens_decoder()
        return {token.content: token_id for token_id, token in sorted(added.items())}

    @property
    def vocab_size(self) -> int:
        """The number of tokens without added ones; ``len(tokenizer)`` counts all."""
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=False))

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    @property
    def all_special_ids(self) -> list[int]:
        """The ids of all special tokens: named ones, and those the tokenizer marks as special."""
        added = self.backend_tokenizer.get_added_tokens_decoder()
        return sorted({*self._named_ids(), *(token_id for token_id, token in added.items() if token.special)})

    def _decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return str(self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def _id_of(self, token: str) -> int | None:
        found = self.backend_tokenizer.token_to_id(token)
        return None if found is None else int(found)

    def _token_of(self, token_id: int) -> str | None:
        found = self.backend_tokenizer.id_to_token(token_id)
        return None if found is None else str(found)
