"""Tokenizer files from a server or from the hub, as a directory on this machine."""

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
from tinkex.observability.tracing import operating

if TYPE_CHECKING:
    from tinkex._transport.caller import Caller

__all__ = ["fetch_from_hub", "fetch_from_server"]

VOCABULARIES = ("tokenizer.json", "tiktoken.model")
"""What a tokenizer cannot be without: one of these."""
OPTIONAL = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
)


def fetch_from_server(caller: Caller, model: str) -> Path | None:
    """The tokenizer files of a served model, or None if the server hands out none.

    They are stored under a name made from their contents, so a stored copy is never out of date.
    """
    try:
        files = background().run(_download(caller, model))
    except NotFoundError:
        return None
    digest = hashlib.sha256()
    for name, content in sorted(files.items()):
        digest.update(f"{name} {len(content)} ".encode())
        digest.update(content)
    return _stored(_cache_home() / digest.hexdigest()[:32], files)


def fetch_from_hub(
    name: str,
    *,
    kimi: bool = False,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | Path | None = None,
) -> Path:
    """The tokenizer files of a hub repository, in the hub's own cache; raises OSError when it cannot give them.

    Files that lie in the cache in that revision are not asked for again.
    """
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
    except ModuleNotFoundError as error:
        raise SetupError(
            f"the tokenizer of {name!r} lies on the Hugging Face Hub; install what fetches it with: "
            "pip install 'tinkex[hub]'"
        ) from error

    def fetch(file: str) -> Path:
        return Path(hf_hub_download(name, file, revision=revision, token=token, cache_dir=cache_dir))

    found = fetch(VOCABULARIES[kimi])
    for optional in OPTIONAL:
        try:
            fetch(optional)
        except LocalEntryNotFoundError:
            continue  # without the hub the cache is all there is
        except EntryNotFoundError:
            continue
    return found.parent


async def _download(caller: Caller, model: str) -> dict[str, bytes]:
    """The files that the server has; no vocabulary is a ``NotFoundError``."""
    row = endpoint("tokenizer_file")

    async def fetch(name: str) -> bytes:
        return (await caller.exchange(row, path={"file": name}, query={"model": model})).body

    files: dict[str, bytes] = {}
    with operating("get_tokenizer", on=caller.config.tracing):
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


def _stored(directory: Path, files: Mapping[str, bytes]) -> Path:
    """Writes the files beside their final place and moves them there, so that no reader sees half of them."""
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
            if not directory.is_dir():  # else another process was quicker, with the same contents
                raise
    return directory


def _cache_home() -> Path:
    home = os.environ.get("TINKEX_HOME")
    return (Path(home).expanduser() if home else Path.home() / ".tinkex") / "tokenizers"
