"""Files as values, for lanes on machines that share no disk with the engine."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from tinkex.errors import InvalidInput

MODEL_FILES = ("config.json", "tokenizer.json", "*.safetensors", "*.safetensors.index.json")


def read_files(directory: Path) -> Mapping[str, bytes]:
    """Returns the contents of the files below a directory by their relative names; raises ``OSError`` if it cannot be read."""
    if not directory.is_dir():
        raise FileNotFoundError(f"there is no directory {directory}")
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def write_files(directory: Path, files: Mapping[str, bytes]) -> None:
    """Writes files into a directory, which is created; raises ``InvalidInput`` for a name that leads out of it."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        path = directory / name
        if not path.resolve().is_relative_to(directory.resolve()):
            raise InvalidInput(f"the file name {name!r} leads out of its directory.")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def model_digests(directory: Path) -> Mapping[str, str]:
    """Returns the SHA-256 of every file of a model that decides its numbers."""
    found = {path for pattern in MODEL_FILES for path in directory.glob(pattern)}
    digests = {}
    for path in sorted(found):
        with path.open("rb") as file:
            digests[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests
