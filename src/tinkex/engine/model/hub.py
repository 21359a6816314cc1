"""Models from the Hugging Face Hub, with the user's hub settings.

``HF_ENDPOINT``, ``HF_TOKEN``, ``HF_HOME`` and ``HF_HUB_OFFLINE`` work as in the hub library.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from tinkex.engine.model.architecture import Architecture
from tinkex.engine.model.config_fields import read_json
from tinkex.engine.model.progress import Progress, report, report_size
from tinkex.errors import SetupError

__all__ = ["HubUnavailable", "cached_snapshot", "download", "missing_files"]

_REQUEST_TIMEOUT_S = 4.0
_TIMEOUT_S = 6.0
_NEEDED_SUFFIXES = (".json", ".safetensors", ".jinja")
Reply = TypeVar("Reply")


class HubUnavailable(SetupError):
    """The model is not available from the hub: not installed, offline, unreachable, or not found."""


def cached_snapshot(name: str, revision: str | None) -> Path | None:
    """The model in the hub library's cache, if it is complete; does not use the network."""
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    try:
        config = try_to_load_from_cache(name, "config.json", revision=revision)
    except ValueError:  # not a valid hub name; a download reports it
        return None
    if not isinstance(config, str):
        return None
    directory = Path(config).parent
    return None if missing_files(directory) else directory


def missing_files(directory: Path) -> list[str]:
    """The files that a model directory lacks: config, tokenizer or weights."""
    missing = [name for name in ("config.json", "tokenizer.json") if not (directory / name).is_file()]
    index = directory / "model.safetensors.index.json"
    if (directory / "model.safetensors").is_file():
        return missing
    if not index.is_file():
        return [*missing, "model.safetensors"]
    shards = set(read_json(index).get("weight_map", {}).values())
    return missing + sorted(shard for shard in shards if not (directory / shard).is_file())


def download(name: str, revision: str | None, directory: Path, progress: Progress | None = None) -> None:
    """Downloads a model into ``directory``, resuming an earlier attempt.

    Fails within seconds if the hub is unreachable, and reads ``config.json`` first, so that an unsupported architecture is
    rejected before its weights are downloaded.
    """
    if _offline():
        raise HubUnavailable("it is disabled (HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set)")
    try:
        from huggingface_hub import HfApi, hf_hub_download
    except ImportError as error:
        raise HubUnavailable("its library is not installed (pip install 'tinkex[hub]')") from error
    report(progress, f"querying the hub for {name}")
    endpoint = os.environ.get("HF_ENDPOINT") or None
    info = _query(
        name,
        lambda: HfApi(endpoint=endpoint).model_info(
            name, revision=revision, timeout=_REQUEST_TIMEOUT_S, files_metadata=True
        ),
    )
    sizes = {file.rfilename: int(file.size or 0) for file in info.siblings or [] if _needed(file.rfilename)}
    if "config.json" not in sizes or not any(file.endswith(".safetensors") for file in sizes):
        raise SetupError(
            f"{name} on the hub has no config.json with safetensors weights; download it, convert it, and pass its directory"
        )

    def fetch(file: str) -> None:
        try:
            hf_hub_download(name, file, revision=info.sha, local_dir=directory, endpoint=endpoint)
        except Exception as error:  # the library's own and its HTTP library's errors share no base class
            raise HubUnavailable(f"downloading {file} failed: {_short(error)}") from error

    with _library_bars_off():
        fetch("config.json")
        Architecture.from_config(read_json(directory / "config.json"))
        with report_size(progress, f"downloading {name}", directory, sum(sizes.values())):
            for file in sorted(sizes):
                fetch(file)
    wrong = [file for file, size in sizes.items() if size and (directory / file).stat().st_size != size]
    missing = missing_files(directory)
    if wrong or missing:
        raise HubUnavailable(f"the download is incomplete: {', '.join(wrong + missing)}")
    shutil.rmtree(directory / ".cache", ignore_errors=True)  # metadata of the hub library


def _query(name: str, request: Callable[[], Reply]) -> Reply:
    """The hub's reply; raises ``HubUnavailable`` within seconds.

    Runs on its own thread, because host name resolution has no timeout.
    """
    replies: list[Reply] = []
    failures: list[Exception] = []

    def query() -> None:
        try:
            replies.append(request())
        except Exception as error:  # noqa: BLE001 -- raised on the calling thread
            failures.append(error)

    thread = threading.Thread(target=query, name="tinkex-hub", daemon=True)
    thread.start()
    thread.join(_TIMEOUT_S)
    if replies:
        return replies[0]
    if not failures:
        raise HubUnavailable(f"it did not reply within {_TIMEOUT_S:g} s")
    status = getattr(getattr(failures[0], "response", None), "status_code", None)
    if status in {401, 403, 404}:
        raise HubUnavailable(
            f"it has no {name} that you may read (HTTP {status}); check the name, or set HF_TOKEN if the model is private or gated"
        ) from failures[0]
    raise HubUnavailable(f"it is unreachable: {_short(failures[0])}") from failures[0]


def _needed(file: str) -> bool:
    """Whether the engine reads a file: at the top level, not another framework's weights or a second copy of them."""
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
    """Disables the progress bars of the hub library."""
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
