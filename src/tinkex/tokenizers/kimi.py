"""The tokenizer of the Kimi models, on ``tiktoken``: no code from the hub runs."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinkex.errors import SetupError
from tinkex.tokenizers.base import BaseTokenizer
from tinkex.tokenizers.tokenizer_config import read_tokenizer_config

if TYPE_CHECKING:
    import tiktoken

__all__ = ["RANKS_FILE", "KimiTokenizer"]

RANKS_FILE = "tiktoken.model"
NUM_SPECIAL = 256
"""Special tokens follow the trained ones; those that the configuration does not name are reserved."""

_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
SPLIT_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""The pre-tokenization pattern: Chinese separately, numbers in groups of three digits."""

_MAX_PIECE_CHARS, _MAX_RUN_CHARS = 400_000, 25_000
_RUN = re.compile(rf"\s{{1,{_MAX_RUN_CHARS}}}|\S{{1,{_MAX_RUN_CHARS}}}")


class KimiTokenizer(BaseTokenizer):
    """The tokenizer of the Kimi models.

    The models add no special tokens to a text, so ``add_special_tokens`` has no effect. Special tokens that occur in a
    text are encoded as such, unless ``allow_special_tokens=False``.
    """

    is_fast = False

    def __init__(
        self,
        ranks: Mapping[bytes, int],
        special: Mapping[str, int],
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
        name_or_path: str = "",
        pattern: str = SPLIT_PATTERN,
    ) -> None:
        super().__init__(
            special_tokens=special_tokens, chat_template=chat_template, name_or_path=name_or_path
        )
        self._ranks, self._added = dict(ranks), dict(special)
        self._added_ids = {token_id: token for token, token_id in special.items()}
        self._encoding: tiktoken.Encoding = _tiktoken().Encoding(
            name=name_or_path or "kimi",
            pat_str=pattern,
            mergeable_ranks=self._ranks,
            special_tokens=self._added,
        )

    @classmethod
    def from_directory(cls, directory: Path) -> KimiTokenizer:
        """Reads ``tiktoken.model``, ``tokenizer_config.json`` and the chat template of a directory."""
        ranks = _read_ranks(directory / RANKS_FILE)
        config = read_tokenizer_config(directory)
        named = config.raw.get("added_tokens_decoder") or {}
        special = {
            _name(named, token_id): token_id for token_id in range(len(ranks), len(ranks) + NUM_SPECIAL)
        }
        return cls(
            ranks,
            special,
            special_tokens=config.special_tokens,
            chat_template=config.chat_template,
            name_or_path=str(directory),
        )

    def encode(
        self, text: str, add_special_tokens: bool = True, allow_special_tokens: bool = True
    ) -> list[int]:
        """Returns the token ids of a text; ``add_special_tokens`` has no effect."""
        del add_special_tokens
        ids: list[int] = []
        for piece in _pieces(text):
            if allow_special_tokens:
                ids += self._encoding.encode(piece, allowed_special="all")
            else:
                ids += self._encoding.encode(piece, disallowed_special=())
        return ids

    def tokenize(self, text: str) -> list[str]:
        """Splits a text into tokens, with one character per byte."""
        return [self._token_text(one) for one in self.encode(text)]

    def get_vocab(self) -> dict[str, int]:
        """Returns all tokens with their ids."""
        return {self._token_text(one): one for one in range(len(self))}

    def get_added_vocab(self) -> dict[str, int]:
        """Returns the special tokens with their ids."""
        return dict(self._added)

    @property
    def vocab_size(self) -> int:
        """The number of tokens, special ones included."""
        return len(self._ranks) + len(self._added)

    def __len__(self) -> int:
        return len(self._ranks) + len(self._added)

    @property
    def all_special_ids(self) -> list[int]:
        """The ids of all special tokens."""
        return sorted(self._added_ids)

    def _decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        kept = [one for one in ids if one not in self._added_ids] if skip_special_tokens else ids
        return self._encoding.decode(kept)

    def _id_of(self, token: str) -> int | None:
        if token in self._added:
            return self._added[token]
        try:
            return self._ranks.get(bytes(self._bytes_by_char[char] for char in token))
        except KeyError:
            return None

    def _token_of(self, token_id: int) -> str | None:
        return self._token_text(token_id) if 0 <= token_id < len(self) else None

    def _token_text(self, token_id: int) -> str:
        if token_id in self._added_ids:
            return self._added_ids[token_id]
        return "".join(_byte_chars()[byte] for byte in self._encoding.decode_single_token_bytes(token_id))

    @cached_property
    def _bytes_by_char(self) -> dict[str, int]:
        return {char: byte for byte, char in enumerate(_byte_chars())}


@lru_cache(maxsize=1)
def _byte_chars() -> list[str]:
    """Returns the character of each byte in a token's text: itself if printable, else one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (chr(code) for code in range(0x100, 0x200))
    return [chr(byte) if byte in printable else next(others) for byte in range(256)]


def _tiktoken() -> Any:
    try:
        import tiktoken
    except ModuleNotFoundError as error:
        raise SetupError(
            "the tokenizer of the Kimi models needs the package tiktoken; install it with: pip install 'tinkex[kimi]'"
        ) from error
    return tiktoken


def _read_ranks(file: Path) -> dict[bytes, int]:
    """Reads a ``tiktoken.model`` file, whose lines are a token in base64 and its rank."""
    if not file.is_file():
        raise SetupError(f"{file.parent} has no {RANKS_FILE}; download the tokenizer of the Kimi model again")
    ranks: dict[bytes, int] = {}
    try:
        for line in file.read_bytes().splitlines():
            if line:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
    except (ValueError, binascii.Error) as error:
        raise SetupError(f"{file} is not a tiktoken file ({error}); download it again") from error
    if sorted(ranks.values()) != list(range(len(ranks))) or not ranks:
        raise SetupError(f"{file} does not number its tokens from 0; download it again")
    return ranks


def _name(named: Mapping[str, Any], token_id: int) -> str:
    entry = named.get(str(token_id))
    content = entry.get("content") if isinstance(entry, Mapping) else None
    return content if isinstance(content, str) else f"<|reserved_token_{token_id}|>"


def _pieces(text: str) -> Iterator[str]:
    """Splits a text into pieces that the split pattern can process; only very long texts have more than one."""
    for offset in range(0, len(text), _MAX_PIECE_CHARS):
        part = text[offset : offset + _MAX_PIECE_CHARS]
        start = 0
        for run in _RUN.finditer(part):
            continues = run.end() < len(part) and part[run.end()].isspace() == part[run.start()].isspace()
            if continues:  # a run longer than the limit is split here
                yield part[start : run.end()]
                start = run.end()
        if start < len(part):
            yield part[start:]
