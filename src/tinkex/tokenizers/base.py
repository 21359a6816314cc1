"""The base class of tokenizers: the common methods of a ``transformers`` tokenizer, for any encoding."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tinkex.tokenizers.added_tokens import NAMED_TOKENS
from tinkex.tokenizers.chat_template import render_chat

__all__ = ["BaseTokenizer", "BatchEncoding"]


class BatchEncoding(dict[str, Any]):
    """The result of calling a tokenizer: a dictionary whose entries are also attributes."""

    @property
    def input_ids(self) -> Any:
        """The token ids."""
        return self["input_ids"]

    @property
    def attention_mask(self) -> Any:
        """1 for every token."""
        return self["attention_mask"]


class BaseTokenizer(ABC):
    """Encodes and decodes text, applies chat templates, and exposes special tokens as ``transformers`` does."""

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

    # ---- implemented by subclasses ----

    @abstractmethod
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of a text, by default with the special tokens that the model adds."""

    @abstractmethod
    def tokenize(self, text: str) -> list[str]:
        """Splits a text into tokens, without adding special tokens."""

    @abstractmethod
    def get_vocab(self) -> dict[str, int]:
        """Returns all tokens with their ids."""

    @abstractmethod
    def get_added_vocab(self) -> dict[str, int]:
        """Returns the tokens added to the trained vocabulary, with their ids."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """The number of tokens without added ones; ``len(tokenizer)`` counts all."""

    @property
    @abstractmethod
    def all_special_ids(self) -> list[int]:
        """The ids of all special tokens: named ones, and those the tokenizer marks as special."""

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
        """Returns the text of a list, an array or a single token id."""
        return self._decode(_ids(token_ids), skip_special_tokens)

    def batch_decode(self, sequences: Iterable[Any], skip_special_tokens: bool = False) -> list[str]:
        """Returns the texts of several token sequences."""
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = True) -> BatchEncoding:
        """Encodes one text or several."""
        if isinstance(text, str):
            ids: Any = self.encode(text, add_special_tokens)
            return BatchEncoding(input_ids=ids, attention_mask=[1] * len(ids))
        batch = [self.encode(one, add_special_tokens) for one in text]
        return BatchEncoding(input_ids=batch, attention_mask=[[1] * len(ids) for ids in batch])

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """Returns the id of one token or several; unknown tokens get the id of ``unk_token``."""
        if isinstance(tokens, str):
            found = self._id_of(tokens)
            return self.unk_token_id if found is None else found
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def convert_ids_to_tokens(self, ids: Any) -> Any:
        """Returns the token of one id or several."""
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
        """Renders the prompt of a chat: token ids, text with ``tokenize=False``, or a dictionary with ``return_dict``.

        A list of chats gives a list of prompts. Further keyword arguments, such as ``enable_thinking``, are passed to
        the template.
        """
        for option in ("padding", "truncation", "max_length", "return_tensors", "continue_final_message"):
            if variables.pop(option, None):
                raise ValueError(
                    f"the light tokenizer does not support {option}; install transformers for it"
                )
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
            return BatchEncoding(input_ids=prompts, attention_mask=[[1] * len(ids) for ids in prompts])
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
        return BatchEncoding(input_ids=ids, attention_mask=[1] * len(ids)) if return_dict else ids

    # ---- special tokens ----

    @property
    def special_tokens_map(self) -> dict[str, str]:
        """The named special tokens, by name."""
        return {name: self._special[name] for name in NAMED_TOKENS if name in self._special}

    @property
    def all_special_tokens(self) -> list[str]:
        """The texts of :attr:`all_special_ids`."""
        return [token for one in self.all_special_ids if (token := self._token_of(one)) is not None]

    @property
    def bos_token(self) -> str | None:
        """The beginning-of-sequence token."""
        return self._special.get("bos_token")

    @property
    def bos_token_id(self) -> int | None:
        """The id of the beginning-of-sequence token."""
        return self._named_id("bos_token")

    @property
    def eos_token(self) -> str | None:
        """The end-of-sequence token."""
        return self._special.get("eos_token")

    @property
    def eos_token_id(self) -> int | None:
        """The id of the end-of-sequence token."""
        return self._named_id("eos_token")

    @property
    def pad_token(self) -> str | None:
        """The padding token."""
        return self._special.get("pad_token")

    @property
    def pad_token_id(self) -> int | None:
        """The id of the padding token."""
        return self._named_id("pad_token")

    @property
    def unk_token(self) -> str | None:
        """The unknown token."""
        return self._special.get("unk_token")

    @property
    def unk_token_id(self) -> int | None:
        """The id of the unknown token."""
        return self._named_id("unk_token")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name_or_path!r}, {len(self)} tokens)"

    def _named_id(self, name: str) -> int | None:
        token = self._special.get(name)
        return None if token is None else self._id_of(token)

    def _named_ids(self) -> list[int]:
        return [found for name in NAMED_TOKENS if (found := self._named_id(name)) is not None]


def _ids(token_ids: Any) -> list[int]:
    """Converts one token id, a list or an array to a list of ids."""
    plain = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
    return [plain] if isinstance(plain, int) else [int(one) for one in plain]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Loads a name of 0.1, with a ``DeprecationWarning``."""
        if name.startswith("__"):  # the import system looks up __path__
            raise AttributeError(name)
        from tinkex._moved import load_renamed

        return load_renamed(__name__, name)
