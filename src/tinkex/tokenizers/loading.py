"""From a model's name, directory or server to its tokenizer, loaded once per process."""

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
    "forget_tokenizers",
    "get_tokenizer",
    "load_tokenizer",
    "prefer_light",
    "tokenizer_from_directory",
]


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

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a text."""
        ...

    def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> str:
        """The text of tokens."""
        ...

    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        *,
        add_generation_prompt: bool = False,
        **options: Any,
    ) -> Any:
        """The prompt of a chat, as tokens or (``tokenize=False``) as text."""
        ...


MOST_KEPT = 64
"""A tokenizer takes megabytes: the one that was loaded longest ago gives way when there are more."""

_cache: dict[object, Tokenizer] = {}
_lock = threading.Lock()
_light = threading.Event()


def get_tokenizer(
    model: str | Path,
    *,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | Path | None = None,
) -> Tokenizer:
    """The tokenizer of a model: a directory or a ``.gguf`` file here, or a model's name on the hub.

    ``revision``, ``token`` and ``cache_dir`` are for the hub; without them ``HF_TOKEN``, ``HF_HOME`` and
    ``HF_ENDPOINT`` hold. Every tokenizer is loaded once per process, of the newest 64::

        tokenizer = tinkex.tokenizers.get_tokenizer("Qwen/Qwen3-8B")
        tokens = tokenizer.encode("Hello")
    """
    path = Path(model).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return _once(_key_of(path), lambda: _from_gguf(path))
    if path.is_dir():
        return tokenizer_from_directory(path)
    name = hub_name(str(model))
    pinned = revision or pinned_revision(name)
    place = str(cache_dir) if cache_dir else None
    key = ("hub", name, pinned, place, os.environ.get("HF_ENDPOINT"), _has_transformers())
    return _once(key, lambda: _from_hub(name, pinned, token, cache_dir))


def load_tokenizer(caller: Caller, *, tokenizer_id: str | None, base_model: str | None) -> Tokenizer:
    """The tokenizer of a model on a server: from a path here, from the server, or from the hub.

    A server that somebody runs for themselves is asked before the hub: it may serve any model under any
    name, and only its own files are sure to fit.
    """
    wanted = tokenizer_id or base_model
    if not wanted:
        raise SetupError(
            "the server does not say which tokenizer its model uses; load one by its name yourself"
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
            return _remember(key, tokenizer_from_directory(directory))
    # The name of a tokenizer is taken at its word; a model's name leads to one by rules.
    name = tokenizer_id.partition(":")[0] if tokenizer_id else hub_name(wanted)
    return _remember(key, _from_hub(name, pinned_revision(name), None, None))


def tokenizer_from_directory(directory: Path) -> Tokenizer:
    """The tokenizer in a model directory: ``tokenizer.json``, or the ``tiktoken.model`` of a Kimi model."""
    return _once(_key_of(directory), lambda: _from_directory(directory))


def forget_tokenizers() -> None:
    """Empties the cache, so that files that have changed are read again."""
    with _lock:
        _cache.clear()


def _once(key: object, load: Callable[[], Tokenizer]) -> Tokenizer:
    with _lock:
        if key in _cache:
            return _cache[key]
    return _remember(key, load())


def _remember(key: object, tokenizer: Tokenizer) -> Tokenizer:
    with _lock:
        kept = _cache.setdefault(key, tokenizer)
        while len(_cache) > MOST_KEPT:
            del _cache[next(iter(_cache))]
        return kept


def _key_of(path: Path) -> object:
    return (str(path.resolve()), _has_transformers())


def _has_transformers() -> bool:
    chosen = os.environ.get("TINKEX_TOKENIZERS", "").strip().lower() or "auto"
    if chosen not in {"auto", "light"}:
        raise ConfigError(f"environment variable TINKEX_TOKENIZERS is 'auto' or 'light', not {chosen!r}")
    return chosen == "auto" and not _light.is_set() and importlib.util.find_spec("transformers") is not None


def prefer_light(light: bool = True) -> None:
    """Light tokenizers from here on, for programs that only encode and decode; False: as usual again."""
    if light:
        _light.set()
    else:
        _light.clear()


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
        raise _unreachable(name, error) from error


def _with_transformers(source: str, **where: Any) -> Tokenizer:
    from transformers import AutoTokenizer

    given = {name: value for name, value in where.items() if value is not None}
    try:
        return cast("Tokenizer", AutoTokenizer.from_pretrained(source, **given))
    except (OSError, ValueError) as error:
        raise _unreachable(source, error) from error


def _thinking_machines(name: str) -> Tokenizer:
    """These models have a tokenizer package of their own, which not everybody can install."""
    try:
        module = importlib.import_module("tml_tokenizers.tinker_tokenizers")
    except ModuleNotFoundError as error:
        raise SetupError(
            f"the tokenizer of {name!r} is not on the hub and tml_tokenizers is not installed; "
            "build prompts with the package tml-renderers instead"
        ) from error
    found = module.get_tinker_tokenizer(name)
    if found is None:
        raise SetupError(f"tml_tokenizers knows no tokenizer for {name!r}; check the model's name")
    return cast("Tokenizer", found)


def _unreachable(source: str, error: Exception) -> SetupError:
    first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return SetupError(
        f"no tokenizer for {source!r}: {first_line}. Reach the hub once so that it is cached, "
        "or name a model directory on this machine"
    )
