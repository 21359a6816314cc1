"""Tokenizers: found by model name, loaded once per process, with or without ``transformers``.

Where ``transformers`` is installed its own tokenizer is returned; otherwise a light one over the
``tokenizers`` package with the same everyday methods.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from tinkex.errors import SetupError

if TYPE_CHECKING:
    from tinkex._transport.caller import Caller

__all__ = ["Tokenizer", "hub_name", "load_tokenizer", "tokenizer_from_directory"]


class Tokenizer(Protocol):
    """What every tokenizer here can do; ``transformers`` tokenizers can do more."""

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text."""
        ...

    @property
    def vocab_size(self) -> int:
        """Number of tokens, without the added ones."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a text."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of tokens."""
        ...

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
        **options: Any,
    ) -> Any:
        """The prompt of a chat, as tokens or (``tokenize=False``) as text."""
        ...


_cache: dict[str, Tokenizer] = {}
_lock = threading.Lock()


def load_tokenizer(caller: Caller, *, tokenizer_id: str | None, base_model: str | None) -> Tokenizer:
    """The tokenizer of a model: from a directory here, from the server, or from the hub.

    A server that somebody runs for themselves is asked before the hub: it may serve any model under any
    name, and only its own files are sure to fit.
    """
    wanted = tokenizer_id or base_model
    if not wanted:
        raise SetupError(
            "the server does not say which tokenizer its model uses; load one by its name yourself"
        )
    if Path(wanted).is_dir():
        return tokenizer_from_directory(Path(wanted))
    key = f"{caller.config.base_url} {base_model or wanted}"
    with _lock:
        if key in _cache:
            return _cache[key]
    if not caller.config.is_hosted:
        from tinkex.tokenizers.files import fetch_from_server

        directory = fetch_from_server(caller, base_model or wanted)
        if directory is not None:
            return _remember(key, tokenizer_from_directory(directory))
    return _remember(key, _from_hub(hub_name(wanted)))


def tokenizer_from_directory(directory: Path) -> Tokenizer:
    """The tokenizer in a model directory (``tokenizer.json`` and its companions)."""
    key = str(directory.resolve())
    with _lock:
        if key in _cache:
            return _cache[key]
    if _has_transformers():
        return _remember(key, _with_transformers(str(directory)))
    from tinkex.tokenizers.light import LightTokenizer

    return _remember(key, LightTokenizer.from_directory(directory))


def hub_name(model: str) -> str:
    """The hub repository that holds the tokenizer of a model name.

    >>> hub_name("Qwen/Qwen3-8B:peft:262144"), hub_name("moonshotai/Kimi-K2/base")
    ('Qwen/Qwen3-8B', 'moonshotai/Kimi-K2')
    """
    name = model.partition(":")[0]
    if name.startswith("meta-llama/Llama-3"):
        return "thinkingmachineslabinc/meta-llama-3-tokenizer"  # the same files, without the licence gate
    return "/".join(name.split("/")[:2])


def _remember(key: str, tokenizer: Tokenizer) -> Tokenizer:
    with _lock:
        return _cache.setdefault(key, tokenizer)


def _has_transformers() -> bool:
    return importlib.util.find_spec("transformers") is not None


def _with_transformers(source: str) -> Tokenizer:
    from transformers import AutoTokenizer

    try:
        return cast("Tokenizer", AutoTokenizer.from_pretrained(source))
    except (OSError, ValueError) as error:
        raise _unreachable(source, error) from error


def _from_hub(name: str) -> Tokenizer:
    if _has_transformers():
        return _with_transformers(name)
    from tinkex.tokenizers.files import fetch_from_hub
    from tinkex.tokenizers.light import LightTokenizer

    try:
        return LightTokenizer.from_directory(fetch_from_hub(name))
    except OSError as error:
        raise _unreachable(name, error) from error


def _unreachable(source: str, error: Exception) -> SetupError:
    first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return SetupError(
        f"no tokenizer for {source!r}: {first_line}. Reach the hub once so that it is cached, "
        "or name a model directory on this machine"
    )
