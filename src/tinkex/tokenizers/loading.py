"""Loads the tokenizer of a model by name, directory or server, with a cache per process."""

from __future__ import annotations

import importlib
import importlib.util
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from tinkex.errors import ConfigError, SetupError
from tinkex.tokenizers.names import hub_name, is_kimi, pinned_revision

if TYPE_CHECKING:
    from tinkex._transport.caller import Caller

__all__ = [
    "Tokenizer",
    "clear_tokenizer_cache",
    "get_tokenizer",
    "load_tokenizer",
    "prefer_light",
    "tokenizer_from_directory",
]


class Tokenizer(Protocol):
    """The methods of every tokenizer here; ``transformers`` tokenizers have more."""

    @property
    def eos_token_id(self) -> int | None:
        """The id of the end-of-sequence token."""
        ...

    @property
    def vocab_size(self) -> int:
        """The number of tokens without added ones."""
        ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of a text."""
        ...

    def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> str:
        """Returns the text of token ids."""
        ...

    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        *,
        add_generation_prompt: bool = False,
        **options: Any,
    ) -> Any:
        """Renders the prompt of a chat, as token ids or (``tokenize=False``) as text."""
        ...


MAX_CACHED = 64
"""A tokenizer takes megabytes of memory; beyond this number the oldest one is evicted."""

_cache: dict[object, Tokenizer] = {}
_lock = threading.Lock()
_prefer_light = threading.Event()


def get_tokenizer(
    model: str | Path,
    *,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | Path | None = None,
) -> Tokenizer:
    """Returns the tokenizer of a model: a local directory or ``.gguf`` file, or a model's name on the hub.

    ``revision``, ``token`` and ``cache_dir`` are for the hub; their defaults are ``HF_TOKEN``, ``HF_HOME`` and
    ``HF_ENDPOINT``. The process caches the latest 64 tokenizers::

        tokenizer = tinkex.tokenizers.get_tokenizer("Qwen/Qwen3-8B")
        tokens = tokenizer.encode("Hello")
    """
    path = Path(model).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return _cached(_cache_key(path), lambda: _from_gguf(path))
    if path.is_dir():
        return tokenizer_from_directory(path)
    name = hub_name(str(model))
    pinned = revision or pinned_revision(name)
    place = str(cache_dir) if cache_dir else None
    key = ("hub", name, pinned, place, os.environ.get("HF_ENDPOINT"), _has_transformers())
    return _cached(key, lambda: _from_hub(name, pinned, token, cache_dir))


def load_tokenizer(caller: Caller, *, tokenizer_id: str | None, base_model: str | None) -> Tokenizer:
    """Returns the tokenizer of a model on a server: from a local path, the server, or the hub.

    A self-hosted server takes precedence over the hub: it may serve any model under any name, so only its own files
    are sure to match.
    """
    wanted = tokenizer_id or base_model
    if not wanted:
        raise SetupError(
            "the server does not report a tokenizer for its model; load one by name with get_tokenizer"
        )
    if Path(wanted).exists():
        return get_tokenizer(wanted)
    key = (caller.config.base_url, base_model or wanted, _has_transformers())
    with _lock:
        if key in _cache:
            return _cache[key]
    if not caller.config.is_hosted:
        from tinkex.tokenizers.files import fetch_from_server

        directory = fetch_from_server(caller, base_model or wanted)
        if directory is not None:
            return _store(key, tokenizer_from_directory(directory))
    # A tokenizer's name is used as it is; a model's name is mapped to a repository.
    name = tokenizer_id.partition(":")[0] if tokenizer_id else hub_name(wanted)
    return _store(key, _from_hub(name, pinned_revision(name), None, None))


def tokenizer_from_directory(directory: Path) -> Tokenizer:
    """Returns the tokenizer in a model directory: ``tokenizer.json``, or the ``tiktoken.model`` of a Kimi model."""
    return _cached(_cache_key(directory), lambda: _from_directory(directory))


def clear_tokenizer_cache() -> None:
    """Clears the cache, so that changed files are read again."""
    with _lock:
        _cache.clear()


def _cached(key: object, load: Callable[[], Tokenizer]) -> Tokenizer:
    with _lock:
        if key in _cache:
            return _cache[key]
    return _store(key, load())


def _store(key: object, tokenizer: Tokenizer) -> Tokenizer:
    with _lock:
        kept = _cache.setdefault(key, tokenizer)
        while len(_cache) > MAX_CACHED:
            del _cache[next(iter(_cache))]
        return kept


def _cache_key(path: Path) -> object:
    return (str(path.resolve()), _has_transformers())


def _has_transformers() -> bool:
    chosen = os.environ.get("TINKEX_TOKENIZERS", "").strip().lower() or "auto"
    if chosen not in {"auto", "light"}:
        raise ConfigError(f"environment variable TINKEX_TOKENIZERS must be 'auto' or 'light', got {chosen!r}")
    return (
        chosen == "auto"
        and not _prefer_light.is_set()
        and importlib.util.find_spec("transformers") is not None
    )


def prefer_light(light: bool = True) -> None:
    """Uses light tokenizers from now on, for programs that only encode and decode; False restores the default."""
    if light:
        _prefer_light.set()
    else:
        _prefer_light.clear()


def _from_directory(directory: Path) -> Tokenizer:
    from tinkex.tokenizers.kimi import RANKS_FILE, KimiTokenizer
    from tinkex.tokenizers.light import LightTokenizer

    if (directory / RANKS_FILE).is_file() and not (directory / "tokenizer.json").is_file():
        return KimiTokenizer.from_directory(directory)
    if _has_transformers():
        return _with_transformers(str(directory))
    return LightTokenizer.from_directory(directory)


def _from_gguf(file: Path) -> Tokenizer:
    from tinkex.tokenizers.gguf_metadata import read_metadata
    from tinkex.tokenizers.gguf_tokenizer import build_tokenizer, special_tokens
    from tinkex.tokenizers.light import LightTokenizer

    metadata = read_metadata(file)
    backend = build_tokenizer(metadata)
    special, template = special_tokens(metadata), metadata.get("tokenizer.chat_template")
    if _has_transformers():
        import transformers

        usual: Any = transformers.PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
            tokenizer_object=backend, name_or_path=str(file), clean_up_tokenization_spaces=False, **special
        )
        usual.chat_template = template
        return cast("Tokenizer", usual)
    return LightTokenizer(backend, special_tokens=special, chat_template=template, name_or_path=str(file))


def _from_hub(name: str, revision: str | None, token: str | None, cache_dir: str | Path | None) -> Tokenizer:
    if name.startswith(("TML/", "thinkingmachines/")):
        return _thinking_machines(name)
    from tinkex.tokenizers.files import fetch_from_hub

    if _has_transformers() and not is_kimi(name):
        return _with_transformers(name, revision=revision, token=token, cache_dir=cache_dir)
    try:
        return _from_directory(
            fetch_from_hub(name, kimi=is_kimi(name), revision=revision, token=token, cache_dir=cache_dir)
        )
    except OSError as error:
        raise _setup_error(name, error) from error


def _with_transformers(source: str, **where: Any) -> Tokenizer:
    from transformers import AutoTokenizer

    given = {name: value for name, value in where.items() if value is not None}
    try:
        return cast("Tokenizer", AutoTokenizer.from_pretrained(source, **given))
    except (OSError, ValueError) as error:
        raise _setup_error(source, error) from error


def _thinking_machines(name: str) -> Tokenizer:
    """Loads a tokenizer of the package ``tml_tokenizers``, which is not public."""
    try:
        module = importlib.import_module("tml_tokenizers.tinker_tokenizers")
    except ModuleNotFoundError as error:
        raise SetupError(
            f"the tokenizer of {name!r} is not on the hub and tml_tokenizers is not installed; "
            "build prompts with the package tml-renderers instead"
        ) from error
    found = module.get_tinker_tokenizer(name)
    if found is None:
        raise SetupError(f"tml_tokenizers has no tokenizer for {name!r}; check the model's name")
    return cast("Tokenizer", found)


def _setup_error(source: str, error: Exception) -> SetupError:
    first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return SetupError(
        f"no tokenizer for {source!r}: {first_line}. Connect to the hub once to cache it, "
        "or pass a local model directory"
    )


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Loads a name of 0.1, with a ``DeprecationWarning``."""
        if name.startswith("__"):  # the import system looks up __path__
            raise AttributeError(name)
        from tinkex._moved import load_renamed

        return load_renamed(__name__, name)
