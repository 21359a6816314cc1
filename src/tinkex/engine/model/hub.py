"""Models from the Hugging Face Hub, with the user's own hub settings.

``HF_ENDPOINT``, ``HF_TOKEN``, ``HF_HOME`` and ``HF_HUB_OFFLINE`` mean what they mean everywhere else.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from tinkex.engine.model.architecture import Architecture
from tinkex.engine.model.progress import Progress, growing, report
from tinkex.errors import SetupError

__all__ = ["HubUnavailable", "cached_snapshot", "download", "missing_files"]

_ANSWER_SECONDS = 4.0
_GIVE_UP_SECONDS = 6.0
_NEEDED_SUFFIXES = (".json", ".safetensors", ".jinja")
Answer = TypeVar("Answer")


class HubUnavailable(SetupError):
    """The hub cannot give this model: not installed, switched off, out of reach, or it does not have it."""


def cached_snapshot(name: str, revision: str | None) -> Path | None:
    """The model in the hub library's own cache, if all of it is there; never touches the network."""
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    try:
        config = try_to_load_from_cache(name, "config.json", revision=revision)
    except ValueError:  # not a name the hub allows; asking the hub will say so
        return None
    if not isinstance(config, str):
        return None
    directory = Path(config).parent
    return None if missing_files(directory) else directory


def missing_files(directory: Path) -> list[str]:
    """What a model directory lacks to be loaded: config, tokenizer or weight files."""
    missing = [name for name in ("config.json", "tokenizer.json") if not (directory / name).is_file()]
    index = directory / "model.safetensors.index.json"
    if (directory / "model.safetensors").is_file():
        return missing
    if not index.is_file():
        return [*missing, "model.safetensors"]
    shards = set(json.loads(index.read_text(encoding="utf-8")).get("weight_map", {}).values())
    return missing + sorted(shard for shard in shards if not (directory / shard).is_file())


def download(name: str, revision: str | None, directory: Path, progress: Progress | None = None) -> None:
    """Downloads a model into ``directory``, resuming what an earlier attempt left there.

    Decides within seconds whether the hub is in reach, and reads ``config.json`` first, so that an unsupported
    architecture is refused before its weights are fetched.
    """
    if _offline():
        raise HubUnavailable("it is switched off (HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set)")
    try:
        from huggingface_hub import HfApi, hf_hub_download
    except ImportError as error:
        raise HubUnavailable("its library is not installed (pip install 'tinkex[hub]')") from error
    report(progress, f"asking the hub for {name}")
    endpoint = os.environ.get("HF_ENDPOINT") or None
    info = _ask(
        name,
        lambda: HfApi(endpoint=endpoint).model_info(
            name, revision=revision, timeout=_ANSWER_SECONDS, files_metadata=True
        ),
    )
    sizes = {file.rfilename: int(file.size or 0) for file in info.siblings or [] if _needed(file.rfilename)}
    if "config.json" not in sizes or not any(file.endswith(".safetensors") for file in sizes):
        raise SetupError(
            f"{name} on the hub has no config.json with safetensors weights; download it, convert it, and give its directory"
        )

    def fetch(file: str) -> None:
        try:
            hf_hub_download(name, file, revision=info.sha, local_dir=directory, endpoint=endpoint)
        except Exception as error:  # the library's own and its HTTP library's errors share no base class
            raise HubUnavailable(f"downloading {file} failed: {_short(error)}") from error

    with _library_bars_off():
        fetch("config.json")
        Architecture.from_config(json.loads((directory / "config.json").read_text(encoding="utf-8")))
        with growing(progress, f"downloading {name}", directory, sum(sizes.values())):
            for file in sorted(sizes):
                fetch(file)
    wrong = [file for file, size in sizes.items() if size and (directory / file).stat().st_size != size]
    missing = missing_files(directory)
    if wrong or missing:
        raise HubUnavailable(f"what it sent is incomplete: {', '.join(wrong + missing)}")
    shutil.rmtree(directory / ".cache", ignore_errors=True)  # the library's own notes on the download


def _ask(name: str, question: Callable[[], Answer]) -> Answer:
    """The hub's answer, or ``HubUnavailable`` within seconds.

    Asked on a thread of its own, because looking up a host name has no time limit.
    """
    answers: list[Answer] = []
    failures: list[Exception] = []

    def ask() -> None:
        try:
            answers.append(question())
        except Exception as error:  # noqa: BLE001 -- handed to the asking thread, which raises it
            failures.append(error)

    thread = threading.Thread(target=ask, name="tinkex-hub", daemon=True)
    thread.start()
    thread.join(_GIVE_UP_SECONDS)
    if answers:
        return answers[0]
    if not failures:
        raise HubUnavailable(f"it did not answer within {_GIVE_UP_SECONDS:g} s")
    status = getattr(getattr(failures[0], "response", None), "status_code", None)
    if status in {401, 403, 404}:
        raise HubUnavailable(
            f"it has no {name} that you may read (HTTP {status}); check the name, or set HF_TOKEN if the model is private or gated"
        ) from failures[0]
    raise HubUnavailable(f"it is out of reach: {_short(failures[0])}") from failures[0]


def _needed(file: str) -> bool:
    """Files at the top that we read; not other frameworks' weights, nor a second copy in another layout."""
    return "/" not in file and file.endswith(_NEEDED_SUFFIXES) and not file.startswith("consolidated")


def _offline() -> bool:
    return any(
        os.environ.get(name, "").upper() in {"1", "ON", "YES", "TRUE"}
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    )


def _short(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


@contextmanager
def _library_bars_off() -> Iterator[None]:
    """Keeps the hub library from drawing its own progress bars next to ours."""
    from huggingface_hub import utils

    library: Any = utils
    if library.are_progress_bars_disabled():
        yield
        return
    library.disable_progress_bars()
    try:
        yield
    finally:
        library.enable_progress_bars()
