"""A light tokenizer over the ``tokenizers`` package, with the everyday methods of the usual ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tinkex.errors import SetupError
from tinkex.tokenizers.added_tokens import add_stated_tokens
from tinkex.tokenizers.description import Description, describe
from tinkex.tokenizers.everyday import EverydayTokenizer

if TYPE_CHECKING:
    import tokenizers

__all__ = ["LightTokenizer"]


class LightTokenizer(EverydayTokenizer):
    """Text to tokens and back, and chats to prompts.

    Build one with :meth:`from_directory`; ``encode``, ``decode``, ``apply_chat_template`` and the special
    tokens work as those of a ``transformers`` tokenizer do.
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
        """Reads ``tokenizer.json``, and what lies beside it: added and special tokens and the chat template."""
        import tokenizers

        file = directory / "tokenizer.json"
        if not file.is_file():
            raise SetupError(
                f"{directory} has no tokenizer.json; save the model's fast tokenizer there, "
                "or install transformers to read other formats"
            )
        described: Description = describe(directory)
        backend = tokenizers.Tokenizer.from_file(str(file))
        add_stated_tokens(backend, directory)
        return cls(
            backend,
            special_tokens=described.special_tokens,
            chat_template=described.chat_template,
            name_or_path=str(directory),
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a text, with what the model puts around a text unless told otherwise."""
        return list(self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def tokenize(self, text: str) -> list[str]:
        """The pieces a text is cut into, without special tokens around it."""
        return list(self.backend_tokenizer.encode(text, add_special_tokens=False).tokens)

    def get_vocab(self) -> dict[str, int]:
        """Every token and its id."""
        return dict(self.backend_tokenizer.get_vocab(with_added_tokens=True))

    def get_added_vocab(self) -> dict[str, int]:
        """The tokens added to the trained ones, and their ids."""
        added = self.backend_tokenizer.get_added_tokens_decoder()
        return {token.content: token_id for token_id, token in sorted(added.items())}

    @property
    def vocab_size(self) -> int:
        """Number of tokens, without the added ones; ``len(tokenizer)`` counts all."""
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=False))

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    @property
    def all_special_ids(self) -> list[int]:
        """Every token that is no text: those with a name, and those the tokenizer marks so."""
        added = self.backend_tokenizer.get_added_tokens_decoder()
        return sorted({*self._named_ids(), *(place for place, token in added.items() if token.special)})

    def _decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return str(self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def _id_of(self, token: str) -> int | None:
        found = self.backend_tokenizer.token_to_id(token)
        return None if found is None else int(found)

    def _token_of(self, token_id: int) -> str | None:
        found = self.backend_tokenizer.id_to_token(token_id)
        return None if found is None else str(found)
