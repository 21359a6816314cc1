"""The everyday methods of a tokenizer, for any way of turning text into tokens and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tinkex.tokenizers.added_tokens import NAMED_TOKENS
from tinkex.tokenizers.chat_template import render_chat

__all__ = ["Encoded", "EverydayTokenizer"]


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


class EverydayTokenizer(ABC):
    """Text to tokens and back, chats to prompts, and the special tokens, named as ``transformers`` names them."""

    is_fast = True
    padding_side = "right"

    def __init__(
        self,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
        name_or_path: str = "",
    ) -> None:
        self.chat_template = chat_template
        self.name_or_path = name_or_path
        self._special = dict(special_tokens or {})

    # ---- what a tokenizer brings ----

    @abstractmethod
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a text, with what the model puts around a text unless told otherwise."""

    @abstractmethod
    def tokenize(self, text: str) -> list[str]:
        """The pieces a text is cut into, without special tokens around it."""

    @abstractmethod
    def get_vocab(self) -> dict[str, int]:
        """Every token and its id."""

    @abstractmethod
    def get_added_vocab(self) -> dict[str, int]:
        """The tokens that are not the result of training the tokenizer, and their ids."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of tokens, without the added ones; ``len(tokenizer)`` counts all."""

    @property
    @abstractmethod
    def all_special_ids(self) -> list[int]:
        """Every token that is no text: those with a name, and those the tokenizer marks so."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def _decode(self, ids: list[int], skip_special_tokens: bool) -> str: ...

    @abstractmethod
    def _id_of(self, token: str) -> int | None: ...

    @abstractmethod
    def _token_of(self, token_id: int) -> str | None: ...

    # ---- text and tokens ----

    def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> str:
        """The text of tokens: a list, an array or a single one."""
        return self._decode(_ids(token_ids), skip_special_tokens)

    def batch_decode(self, sequences: Iterable[Any], skip_special_tokens: bool = False) -> list[str]:
        """The texts of several token sequences."""
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = True) -> Encoded:
        """The tokens of a text, or of each of several, under ``input_ids``."""
        if isinstance(text, str):
            ids: Any = self.encode(text, add_special_tokens)
            return Encoded(input_ids=ids, attention_mask=[1] * len(ids))
        rows = [self.encode(one, add_special_tokens) for one in text]
        return Encoded(input_ids=rows, attention_mask=[[1] * len(row) for row in rows])

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """The id of a token given by its own text, or of each of several; unknown ones have that of ``unk_token``."""
        if isinstance(tokens, str):
            found = self._id_of(tokens)
            return self.unk_token_id if found is None else found
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def convert_ids_to_tokens(self, ids: Any) -> Any:
        """The token of an id, or of each of several."""
        if isinstance(ids, int):
            return self._token_of(ids)
        return [self._token_of(one) for one in _ids(ids)]

    # ---- chats ----

    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        tools: Sequence[Any] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        return_dict: bool = False,
        **variables: Any,
    ) -> Any:
        """The prompt of a chat: tokens, text with ``tokenize=False``, or a dictionary with ``return_dict``.

        Several chats at once give a list of prompts. Further keyword arguments reach the template, such as
        ``enable_thinking``.
        """
        for option in ("padding", "truncation", "max_length", "return_tensors", "continue_final_message"):
            if variables.pop(option, None):
                raise ValueError(f"this light tokenizer has no {option}; install transformers for it")
        template = chat_template or self.chat_template
        if template is None:
            raise ValueError(
                f"the tokenizer {self.name_or_path!r} has no chat template; pass chat_template=…"
            )
        if conversation and isinstance(conversation[0], Sequence):
            options = {"tools": tools, "chat_template": chat_template, "tokenize": tokenize, **variables}
            prompts = [
                self.apply_chat_template(one, add_generation_prompt=add_generation_prompt, **options)
                for one in conversation
            ]
            if not (tokenize and return_dict):
                return prompts
            return Encoded(input_ids=prompts, attention_mask=[[1] * len(row) for row in prompts])
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

    # ---- special tokens ----

    @property
    def special_tokens_map(self) -> dict[str, str]:
        """The special tokens that have a name, by it."""
        return {name: self._special[name] for name in NAMED_TOKENS if name in self._special}

    @property
    def all_special_tokens(self) -> list[str]:
        """The texts of :attr:`all_special_ids`."""
        return [token for one in self.all_special_ids if (token := self._token_of(one)) is not None]

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

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name_or_path!r}, {len(self)} tokens)"

    def _named_id(self, name: str) -> int | None:
        token = self._special.get(name)
        return None if token is None else self._id_of(token)

    def _named_ids(self) -> list[int]:
        return [found for name in NAMED_TOKENS if (found := self._named_id(name)) is not None]


def _ids(token_ids: Any) -> list[int]:
    """Token ids as a list: from one, from a list, or from anything like an array."""
    plain = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
    return [plain] if isinstance(plain, int) else [int(one) for one in plain]
