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

if TYPE_CHECKING:
    from tinkex._transport.caller import Caller

__all__ = ["fetch_from_hub", "fetch_from_server"]

REQUIRED = "tokenizer.json"
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


def fetch_from_hub(name: str) -> Path:
    """The tokenizer files of a hub repository; raises OSError when the hub cannot give them."""
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError
    except ModuleNotFoundError as error:
        raise SetupError(
            f"the tokenizer of {name!r} lies on the Hugging Face Hub; install what fetches it with: "
            "pip install 'tinkex[hub]'"
        ) from error
    file = Path(hf_hub_download(name, REQUIRED))
    for optional in OPTIONAL:
        try:
            hf_hub_download(name, optional)
        except EntryNotFoundError:
            continue
    return file.parent


async def _download(caller: Caller, model: str) -> dict[str, bytes]:
    row = endpoint("tokenizer_file")
    files: dict[str, bytes] = {}
    for name in (REQUIRED, *OPTIONAL):
        try:
            files[name] = (await caller.exchange(row, path={"file": name}, query={"model": model})).body
        except NotFoundError:
            if name == REQUIRED:
                raise
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
