"""A light tokenizer over the ``tokenizers`` package, with the everyday methods of the usual ones."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinkex.chat_template import render_chat
from tinkex.errors import SetupError

if TYPE_CHECKING:
    import tokenizers

__all__ = ["Encoded", "LightTokenizer"]

_NAMED = ("bos_token", "eos_token", "pad_token", "unk_token")


class Encoded(dict[str, Any]):
    """What calling a tokenizer returns: a dictionary whose entries are attributes too."""

    @property
    def input_ids(self) -> Any:
        """The tokens."""
        return self["input_ids"]

    @property
    def attention_mask(self) -> Any:
        """1 for every token."""
        return self["attention_mask"]


class LightTokenizer:
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
        self.backend_tokenizer = backend
        self.chat_template = chat_template
        self.name_or_path = name_or_path
        self._special = dict(special_tokens or {})

    @classmethod
    def from_directory(cls, directory: Path) -> LightTokenizer:
        """Reads ``tokenizer.json``, and what lies beside it: special tokens and the chat template."""
        import tokenizers

        file = directory / "tokenizer.json"
        if not file.is_file():
            raise SetupError(
                f"{directory} has no tokenizer.json; save the model's fast tokenizer there, "
                "or install transformers to read other formats"
            )
        config = _read_json(directory / "tokenizer_config.json")
        return cls(
            tokenizers.Tokenizer.from_file(str(file)),
            special_tokens=_special_tokens(_read_json(directory / "special_tokens_map.json"), config),
            chat_template=_chat_template(directory / "chat_template.jinja", config),
            name_or_path=str(directory),
        )

    # ---- text and tokens ----

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a text, with what the model puts around a text unless told otherwise."""
        return list(self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: int | Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of tokens."""
        ids = [token_ids] if isinstance(token_ids, int) else [int(token) for token in token_ids]
        return str(self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def batch_decode(
        self, sequences: Sequence[Sequence[int]], *, skip_special_tokens: bool = False
    ) -> list[str]:
        """The texts of several token sequences."""
        return [self.decode(ids, skip_special_tokens=skip_special_tokens) for ids in sequences]

    def tokenize(self, text: str) -> list[str]:
        """The pieces a text is cut into, without special tokens around it."""
        return list(self.backend_tokenizer.encode(text, add_special_tokens=False).tokens)

    def __call__(self, text: str | Sequence[str], *, add_special_tokens: bool = True) -> Encoded:
        """The tokens of a text, or of each of several, under ``input_ids``."""
        if isinstance(text, str):
            ids: Any = self.encode(text, add_special_tokens=add_special_tokens)
            return Encoded(input_ids=ids, attention_mask=[1] * len(ids))
        rows = [self.encode(one, add_special_tokens=add_special_tokens) for one in text]
        return Encoded(input_ids=rows, attention_mask=[[1] * len(row) for row in rows])

    # ---- chats ----

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        return_dict: bool = False,
        **variables: Any,
    ) -> Any:
        """The prompt of a chat: tokens, text with ``tokenize=False``, or a dictionary with ``return_dict``.

        Further keyword arguments reach the template, such as ``enable_thinking``.
        """
        for option in ("padding", "truncation", "max_length", "return_tensors", "continue_final_message"):
            if variables.pop(option, None):
                raise ValueError(f"this light tokenizer has no {option}; install transformers for it")
        template = chat_template or self.chat_template
        if template is None:
            raise ValueError(
                f"the tokenizer {self.name_or_path!r} has no chat template; pass chat_template=…"
            )
        text = render_chat(
            template,
            messages=list(conversation),
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            **{**self._special, **variables},
        )
        if not tokenize:
            return text
        ids = self.encode(text, add_special_tokens=False)
        return Encoded(input_ids=ids, attention_mask=[1] * len(ids)) if return_dict else ids

    # ---- the vocabulary ----

    @property
    def vocab_size(self) -> int:
        """Number of tokens, without the added ones; ``len(tokenizer)`` counts all."""
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=False))

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    def get_vocab(self) -> dict[str, int]:
        """Every token and its id."""
        return dict(self.backend_tokenizer.get_vocab(with_added_tokens=True))

    def convert_tokens_to_ids(self, tokens: str | list[str]) -> Any:
        """The id of a token given by its own text, or of each of several; unknown ones have none."""
        if isinstance(tokens, str):
            return self._token_id(tokens)
        return [self._token_id(token) for token in tokens]

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> Any:
        """The token of an id, or of each of several."""
        if isinstance(ids, int):
            return self.backend_tokenizer.id_to_token(ids)
        return [self.backend_tokenizer.id_to_token(int(one)) for one in ids]

    # ---- special tokens ----

    @property
    def bos_token(self) -> str | None:
        """The text of the token that begins a text."""
        return self._special.get("bos_token")

    @property
    def bos_token_id(self) -> int | None:
        """The token that begins a text."""
        return self._named_id("bos_token")

    @property
    def eos_token(self) -> str | None:
        """The text of the token that ends a text."""
        return self._special.get("eos_token")

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text."""
        return self._named_id("eos_token")

    @property
    def pad_token(self) -> str | None:
        """The text of the token that fills up batches."""
        return self._special.get("pad_token")

    @property
    def pad_token_id(self) -> int | None:
        """The token that fills up batches."""
        return self._named_id("pad_token")

    @property
    def unk_token(self) -> str | None:
        """The text of the token for what has no other."""
        return self._special.get("unk_token")

    @property
    def unk_token_id(self) -> int | None:
        """The token for what has no other."""
        return self._named_id("unk_token")

    @property
    def all_special_ids(self) -> list[int]:
        """Every token that is no text: those with a name, and those the tokenizer marks so."""
        added = self.backend_tokenizer.get_added_tokens_decoder()
        marked = [token_id for token_id, token in added.items() if token.special]
        named = [found for name in _NAMED if (found := self._named_id(name)) is not None]
        return sorted({*marked, *named})

    def __repr__(self) -> str:
        return f"LightTokenizer({self.name_or_path!r}, {len(self)} tokens)"

    def _named_id(self, name: str) -> int | None:
        token = self._special.get(name)
        return None if token is None else self._token_id(token)

    def _token_id(self, token: str) -> int | None:
        found = self.backend_tokenizer.token_to_id(token)
        return None if found is None else int(found)


def _special_tokens(*configs: Mapping[str, Any]) -> dict[str, str]:
    """The named special tokens; a later config has the last word."""
    found: dict[str, str] = {}
    for config in configs:
        for name in _NAMED:
            value = config.get(name)
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


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SetupError(f"{path} is no JSON ({error}); fetch the tokenizer again") from error
    return value if isinstance(value, dict) else {}
