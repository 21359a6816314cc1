"""The model's tokenizer: text to tokens, tokens to text and to exact bytes, chats to prompts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tinkex.engine.model.architecture import eos_token_ids
from tinkex.errors import InvalidInput, SetupError
from tinkex.tokenizers.added_tokens import add_configured_tokens, named_tokens, read_json_object
from tinkex.tokenizers.chat_template import chat_template_of, render_chat

if TYPE_CHECKING:
    from pathlib import Path

    from tokenizers import Tokenizer

__all__ = ["EngineTokenizer"]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class EngineTokenizer:
    """The tokenizer in a model directory, without ``transformers``.

    Reads ``tokenizer.json``, added tokens from the files beside it, and the special tokens and chat template from
    ``tokenizer_config.json`` (or ``chat_template.jinja``). Thread-safe.

    Example:
        >>> tokenizer = EngineTokenizer(directory)
        >>> tokenizer.decode(tokenizer.encode("Hello"))
        'Hello'
    """

    def __init__(self, directory: Path) -> None:
        from tokenizers import Tokenizer

        self.directory = directory
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise SetupError(
                f"{directory} has no tokenizer.json; save the model's fast tokenizer there "
                "(AutoTokenizer.from_pretrained(...).save_pretrained(...))"
            )
        try:
            self.definition: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exception for a file it cannot read
            raise SetupError(
                f"{path} cannot be read as a tokenizer ({error}); download the model again"
            ) from error
        add_configured_tokens(self._tokenizer, directory)
        self.special_tokens = named_tokens(directory)
        self.chat_template = chat_template_of(
            directory, read_json_object(directory / "tokenizer_config.json")
        )
        self.eos_token_ids = self._eos_token_ids()

    @property
    def backend(self) -> Tokenizer:
        """The tokenizer of the ``tokenizers`` package, with every added token."""
        return self._tokenizer

    @property
    def vocab_size(self) -> int:
        """The number of tokens, added ones included; a model can have more rows."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The tokens of ``text``, by default with the special tokens that the model adds (such as a BOS)."""
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of ``token_ids``; bytes that are not valid UTF-8 become replacement characters."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def decode_bytes(self, token_ids: Sequence[int]) -> bytes:
        """The exact bytes of ``token_ids``, also where a UTF-8 sequence is split between tokens.

        The bytes of a sequence are those of its tokens concatenated, so stop strings can be found across token
        boundaries. A token id without an entry has no bytes.
        """
        table = self.token_bytes
        return b"".join([table[token] if 0 <= token < len(table) else b"" for token in token_ids])

    def token_id(self, token: str) -> int | None:
        """The id of a token by its text, such as ``<|im_end|>``."""
        token_id = self._tokenizer.token_to_id(token)
        return None if token_id is None else int(token_id)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """The prompt tokens of a chat, in the format of the model's training."""
        text = self.render_chat_template(messages, add_generation_prompt=add_generation_prompt, **variables)
        return self.encode(text, add_special_tokens=False)

    def render_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt text of a chat; ``variables`` are passed to the template (``tools``, ``enable_thinking``…)."""
        if self.chat_template is None:
            raise InvalidInput(
                f"the model in {self.directory} has no chat template; send a text prompt instead of messages"
            )
        return render_chat(
            self.chat_template,
            messages=list(messages),
            add_generation_prompt=add_generation_prompt,
            **{**self.special_tokens, **variables},
        )

    @cached_property
    def end_of_turn_id(self) -> int | None:
        """The special token that the chat template puts after an answer, if it puts one there.

        Base models often have a template whose turns do not end with their end-of-text token.
        """
        answer = "answer"
        chat = [{"role": "user", "content": "question"}, {"role": "assistant", "content": answer}]
        try:
            rendered = self.render_chat_template(chat, add_generation_prompt=False)
        except InvalidInput:  # there is no template, or it rejects this chat
            return None
        after = self.encode(rendered.rpartition(answer)[2], add_special_tokens=False)
        return after[0] if after and after[0] in self.special_token_ids else None

    @cached_property
    def special_token_ids(self) -> list[int]:
        """The tokens that are not text, such as ``<|im_end|>``."""
        added = self._tokenizer.get_added_tokens_decoder()
        return sorted(token_id for token_id, token in added.items() if token.special)

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """The bytes of every token, by id."""
        added = {
            token_id: token.content for token_id, token in self._tokenizer.get_added_tokens_decoder().items()
        }
        to_bytes = _bytes_of_token(self.definition)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        table = [b""] * (max(vocabulary.values(), default=-1) + 1)
        for token, token_id in vocabulary.items():
            table[token_id] = added[token_id].encode() if token_id in added else to_bytes(token)
        return table

    @cached_property
    def max_token_bytes(self) -> int:
        """The length of the longest token, in bytes: a text of more bytes than that has at least two tokens."""
        return max(map(len, self.token_bytes), default=0)

    def _eos_token_ids(self) -> tuple[int, ...]:
        """Every token that ends a text: those of the generation config, and the tokenizer's own."""
        generation = eos_token_ids(read_json_object(self.directory / "generation_config.json"))
        stated = generation or eos_token_ids(read_json_object(self.directory / "config.json"))
        own = self.token_id(self.special_tokens["eos_token"]) if "eos_token" in self.special_tokens else None
        return tuple(dict.fromkeys([*stated, *([] if own is None else [own])]))


def _bytes_of_token(definition: Mapping[str, Any]) -> Any:
    """A function from a vocabulary entry to its bytes, chosen by the tokenizer's decoder."""
    decoder = definition.get("decoder") or {}
    kinds = {part.get("type") for part in [decoder, *(decoder.get("decoders") or [])]}
    if "ByteLevel" in kinds:
        spelling = _byte_level_alphabet()
        return lambda token: b"".join([spelling.get(char) or char.encode() for char in token])
    if kinds & {"ByteFallback", "Metaspace"}:
        return _sentencepiece_bytes
    raise SetupError(
        f"the tokenizer's decoder ({', '.join(sorted(map(str, kinds)))}) is not supported; "
        "byte-level and SentencePiece tokenizers are"
    )


def _sentencepiece_bytes(token: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token.replace("▁", " ").encode()


def _byte_level_alphabet() -> dict[str, bytes]:
    """The character of each byte: itself if printable, else the next one from U+0100 on."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): bytes([byte]) for byte in printable} | {
        chr(0x100 + index): bytes([byte]) for index, byte in enumerate(others)
    }
