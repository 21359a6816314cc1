"""The tokenizer of the Kimi models, over ``tiktoken``: no code from the hub is run."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinkex.errors import SetupError
from tinkex.tokenizers.description import describe
from tinkex.tokenizers.everyday import EverydayTokenizer

if TYPE_CHECKING:
    import tiktoken

__all__ = ["RANKS_FILE", "KimiTokenizer"]

RANKS_FILE = "tiktoken.model"
NUM_SPECIAL = 256
"""Special tokens follow the trained ones; those without a name in the configuration are reserved."""

_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
WORDS = "|".join(
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
"""How the models cut text into words before merging: Chinese by itself, numbers by three digits."""

_LONGEST_PIECE, _LONGEST_RUN = 400_000, 25_000
_RUN = re.compile(rf"\s{{1,{_LONGEST_RUN}}}|\S{{1,{_LONGEST_RUN}}}")


class KimiTokenizer(EverydayTokenizer):
    """Text to tokens and back as the Kimi models see it.

    The models put nothing around a text, so ``add_special_tokens`` adds nothing. Special tokens written out
    in a text become those tokens, unless ``allow_special_tokens=False``.
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
        pattern: str = WORDS,
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
        """Reads ``tiktoken.model`` and, beside it, ``tokenizer_config.json`` and the chat template."""
        ranks = _read_ranks(directory / RANKS_FILE)
        described = describe(directory)
        named = described.config.get("added_tokens_decoder") or {}
        special = {_name(named, place): place for place in range(len(ranks), len(ranks) + NUM_SPECIAL)}
        return cls(
            ranks,
            special,
            special_tokens=described.special_tokens,
            chat_template=described.chat_template,
            name_or_path=str(directory),
        )

    def encode(
        self, text: str, add_special_tokens: bool = True, allow_special_tokens: bool = True
    ) -> list[int]:
        """The tokens of a text; the models put nothing around it, whatever ``add_special_tokens`` says."""
        del add_special_tokens
        ids: list[int] = []
        for piece in _pieces(text):
            if allow_special_tokens:
                ids += self._encoding.encode(piece, allowed_special="all")
            else:
                ids += self._encoding.encode(piece, disallowed_special=())
        return ids

    def tokenize(self, text: str) -> list[str]:
        """The pieces a text is cut into, one character per byte."""
        return [self._spelled(one) for one in self.encode(text)]

    def get_vocab(self) -> dict[str, int]:
        """Every token and its id."""
        return {self._spelled(one): one for one in range(len(self))}

    def get_added_vocab(self) -> dict[str, int]:
        """The special tokens and their ids."""
        return dict(self._added)

    @property
    def vocab_size(self) -> int:
        """Number of tokens; the special ones are part of the vocabulary."""
        return len(self._ranks) + len(self._added)

    def __len__(self) -> int:
        return len(self._ranks) + len(self._added)

    @property
    def all_special_ids(self) -> list[int]:
        """Every token that is no text."""
        return sorted(self._added_ids)

    def _decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        kept = [one for one in ids if one not in self._added_ids] if skip_special_tokens else ids
        return self._encoding.decode(kept)

    def _id_of(self, token: str) -> int | None:
        if token in self._added:
            return self._added[token]
        try:
            return self._ranks.get(bytes(self._bytes_by_letter[letter] for letter in token))
        except KeyError:
            return None

    def _token_of(self, token_id: int) -> str | None:
        return self._spelled(token_id) if 0 <= token_id < len(self) else None

    def _spelled(self, token_id: int) -> str:
        if token_id in self._added_ids:
            return self._added_ids[token_id]
        return "".join(_letters()[byte] for byte in self._encoding.decode_single_token_bytes(token_id))

    @cached_property
    def _bytes_by_letter(self) -> dict[str, int]:
        return {letter: byte for byte, letter in enumerate(_letters())}


@lru_cache(maxsize=1)
def _letters() -> list[str]:
    """The letter that stands for each byte in a token's text: itself where it prints, else one from U+0100 on."""
    prints = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (chr(place) for place in range(0x100, 0x200))
    return [chr(byte) if byte in prints else next(others) for byte in range(256)]


def _tiktoken() -> Any:
    try:
        import tiktoken
    except ModuleNotFoundError as error:
        raise SetupError(
            "the tokenizer of the Kimi models needs the package tiktoken; install it with: pip install 'tinkex[kimi]'"
        ) from error
    return tiktoken


def _read_ranks(file: Path) -> dict[bytes, int]:
    """The tokens of a ``tiktoken.model`` file, whose lines are a token in base64 and its number."""
    if not file.is_file():
        raise SetupError(f"{file.parent} has no {RANKS_FILE}; fetch the tokenizer of the Kimi model again")
    ranks: dict[bytes, int] = {}
    try:
        for line in file.read_bytes().splitlines():
            if line:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
    except (ValueError, binascii.Error) as error:
        raise SetupError(f"{file} is no tiktoken file ({error}); fetch it again") from error
    if sorted(ranks.values()) != list(range(len(ranks))) or not ranks:
        raise SetupError(f"{file} does not number its tokens from 0 on; fetch it again")
    return ranks


def _name(named: Mapping[str, Any], place: int) -> str:
    entry = named.get(str(place))
    content = entry.get("content") if isinstance(entry, Mapping) else None
    return content if isinstance(content, str) else f"<|reserved_token_{place}|>"


def _pieces(text: str) -> Iterator[str]:
    """The text in pieces that the word pattern can work through; only enormous texts have more than one."""
    for start in range(0, len(text), _LONGEST_PIECE):
        part = text[start : start + _LONGEST_PIECE]
        begun = 0
        for run in _RUN.finditer(part):
            goes_on = run.end() < len(part) and part[run.end()].isspace() == part[run.start()].isspace()
            if goes_on:  # a run longer than the pattern may see is cut off here
                yield part[begun : run.end()]
                begun = run.end()
        if begun < len(part):
            yield part[begun:]
