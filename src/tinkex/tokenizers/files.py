"""Downloads tokenizer files from a server or the hub into a local directory."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tinkex._runtime import background
from tinkex._wire.endpoints import endpoint
from tinkex.errors import NotFoundError, SetupError
from tinkex.observability.tracing import trace_operation

if TYPE_CHECKING:
    from tinkex._transport.caller import Caller

__all__ = ["fetch_from_hub", "fetch_from_server"]

VOCABULARIES = ("tokenizer.json", "tiktoken.model")
"""A tokenizer needs one of these."""
OPTIONAL = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
)


def fetch_from_server(caller: Caller, model: str) -> Path | None:
    """Downloads the tokenizer files of a served model; returns None if the server has none.

    They are stored under a hash of their contents, so a cached copy is never stale.
    """
    try:
        files = background().run(_download(caller, model))
    except NotFoundError:
        return None
    digest = hashlib.sha256()
    for name, content in sorted(files.items()):
        digest.update(f"{name} {len(content)} ".encode())
        digest.update(content)
    return _store(_cache_home() / digest.hexdigest()[:32], files)


def fetch_from_hub(
    name: str,
    *,
    kimi: bool = False,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | Path | None = None,
) -> Path:
    """Downloads the tokenizer files of a hub repository into the hub's cache; raises ``OSError`` if that fails.

    Files of that revision that are in the cache are not downloaded again.
    """
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
    except ModuleNotFoundError as error:
        raise SetupError(
            f"the tokenizer of {name!r} is on the Hugging Face Hub; to download it: pip install 'tinkex[hub]'"
        ) from error

    def fetch(file: str) -> Path:
        return Path(hf_hub_download(name, file, revision=revision, token=token, cache_dir=cache_dir))

    found = fetch(VOCABULARIES[kimi])
    for optional in OPTIONAL:
        try:
            fetch(optional)
        except LocalEntryNotFoundError:
            continue  # offline: only the cache is available
        except EntryNotFoundError:
            continue
    return found.parent


async def _download(caller: Caller, model: str) -> dict[str, bytes]:
    """Downloads the files that the server has; raises ``NotFoundError`` if it has no vocabulary."""
    tokenizer_file = endpoint("tokenizer_file")

    async def fetch(name: str) -> bytes:
        return (await caller.exchange(tokenizer_file, path={"file": name}, query={"model": model})).body

    files: dict[str, bytes] = {}
    with trace_operation("get_tokenizer", on=caller.config.tracing):
        try:
            files[VOCABULARIES[0]] = await fetch(VOCABULARIES[0])
        except NotFoundError:
            files[VOCABULARIES[1]] = await fetch(VOCABULARIES[1])
        for name in OPTIONAL:
            try:
                files[name] = await fetch(name)
            except NotFoundError:
                continue
    return files


def _store(directory: Path, files: Mapping[str, bytes]) -> Path:
    """Writes the files to a temporary directory and renames it, so that readers never see a partial copy."""
    if directory.is_dir():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, ignore_cleanup_errors=True) as scratch:
        fresh = Path(scratch) / "files"
        fresh.mkdir()
        for name, content in files.items():
            (fresh / name).write_bytes(content)
        try:
            fresh.rename(directory)
        except OSError:
            if not directory.is_dir():  # else another process has stored the same contents
                raise
    return directory


def _cache_home() -> Path:
    home = os.environ.get("TINKEX_HOME")
    return (Path(home).expanduser() if home else Path.home() / ".tinkex") / "tokenizers"
