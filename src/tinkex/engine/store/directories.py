"""Weight directories and files on disk, written atomically.

Layout under the data directory: ``checkpoints/<run>/<kind>/<name>``, ``snapshots/<number>`` and the files
``savepoints/<number>``, ``assets/<number>`` and ``downloads/<number>/<file>``. Everything is written under a temporary
name, flushed and renamed before a row of the database refers to it. Files that no row refers to were left by a crash and
are removed at the next start.
"""

from __future__ import annotations

import re
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from tinkex.engine.store.flushing import flush_path
from tinkex.errors import InvalidInput

CHECKPOINTS = "checkpoints"
SNAPSHOTS = "snapshots"
SAVEPOINTS = "savepoints"
DOWNLOADS = "downloads"
ASSETS = "assets"
_UNFINISHED = ".unfinished-"
_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")


def check_name(name: str) -> str:
    """Returns the checkpoint name; raises :class:`InvalidInput`, which lists the allowed characters.

    >>> check_name("step-0010")
    'step-0010'
    """
    if _NAME.fullmatch(name) is None or not name.strip("."):
        raise InvalidInput(
            f"{name!r} is not a valid checkpoint name; use 1 to 128 letters, digits, '.', '_' and '-', such as 'step-0010'."
        )
    return name


@dataclass
class StagedWrite:
    """A write in progress: the content goes to ``temporary``, which is renamed to ``final``."""

    temporary: Path
    final: str
    size_bytes: int = 0


class Directories:
    """Writes, finds and removes weight directories under one root."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def resolve(self, directory: str) -> Path:
        """Returns the absolute path of a stored directory."""
        return self.root / directory

    @contextmanager
    def checkpoint(self, run_id: str, kind: str, name: str) -> Iterator[StagedWrite]:
        """Write a checkpoint; it is complete on disk when the block ends without an error."""
        # ':' is part of every run id, and not every file system allows it in names.
        parent = f"{CHECKPOINTS}/{run_id.replace(':', '~')}/{kind}"
        final = f"{parent}/{check_name(name)}"
        if (self.root / final).exists():
            # The old one stays readable until the database refers to the new one; '@' is not valid in a name.
            final = f"{final}@{secrets.token_hex(4)}"
        with self._write(parent, final) as writing:
            yield writing

    @contextmanager
    def snapshot(self) -> Iterator[StagedWrite]:
        """Write an unnamed snapshot to a directory with a random name."""
        with self._write(SNAPSHOTS, f"{SNAPSHOTS}/{secrets.token_hex(8)}") as writing:
            yield writing

    @contextmanager
    def _write(self, parent: str, final: str) -> Iterator[StagedWrite]:
        folder = self.root / parent
        folder.mkdir(parents=True, exist_ok=True)
        writing = StagedWrite(folder / f"{_UNFINISHED}{secrets.token_hex(8)}", final)
        writing.temporary.mkdir()
        try:
            yield writing
            writing.size_bytes = _size(writing.temporary)
            for file in (entry for entry in writing.temporary.rglob("*") if entry.is_file()):
                flush_path(file)
            flush_path(writing.temporary)
            writing.temporary.rename(self.root / final)
            flush_path(folder)
        except SafetensorError as error:
            shutil.rmtree(writing.temporary, ignore_errors=True)
            raise OSError(str(error)) from error  # safetensors raises its own error when a write fails
        except BaseException:
            shutil.rmtree(writing.temporary, ignore_errors=True)
            raise

    @contextmanager
    def savepoint(self) -> Iterator[StagedWrite]:
        """Write a savepoint file; it is on disk under its final name when the block ends without an error."""
        folder = self.root / SAVEPOINTS
        folder.mkdir(exist_ok=True)
        number = secrets.token_hex(8)
        writing = StagedWrite(folder / f"{_UNFINISHED}{number}", f"{SAVEPOINTS}/{number}")
        try:
            yield writing
            flush_path(writing.temporary)
            writing.size_bytes = writing.temporary.stat().st_size
            writing.temporary.rename(self.root / writing.final)
            flush_path(folder)
        except BaseException:
            writing.temporary.unlink(missing_ok=True)
            raise

    def new_asset_path(self) -> Path:
        """Returns a temporary path for an upload; the caller commits it with :meth:`commit_asset` or deletes it."""
        folder = self.root / ASSETS
        folder.mkdir(exist_ok=True)
        return folder / f"{_UNFINISHED}{secrets.token_hex(8)}"

    def commit_asset(self, temporary: Path) -> str:
        """Flush a complete upload and rename it to a random name; returns that name."""
        flush_path(temporary)
        final = f"{ASSETS}/{secrets.token_hex(8)}"
        temporary.rename(self.root / final)
        flush_path(temporary.parent)
        return final

    def remove_asset(self, file: str) -> None:
        """Delete the file of an asset, if it exists."""
        (self.root / file).unlink(missing_ok=True)

    def downloads(self) -> Path:
        """Returns the directory for files that callers in this process read, each in its own subdirectory."""
        folder = self.root / DOWNLOADS
        folder.mkdir(exist_ok=True)
        return folder

    def remove_downloads(self, before: float) -> None:
        """Delete downloads last modified before the given time."""
        for folder in self.root.glob(f"{DOWNLOADS}/*"):
            if folder.stat().st_mtime < before:
                shutil.rmtree(folder, ignore_errors=True)

    def remove_savepoint(self, file: str) -> None:
        """Delete the file of a savepoint, if it exists."""
        (self.root / file).unlink(missing_ok=True)

    def size(self, directory: str) -> int | None:
        """Returns the total size of a stored directory's files, or None if it does not exist."""
        path = self.root / directory
        return _size(path) if path.is_dir() else None

    def remove(self, directory: str) -> None:
        """Delete a directory, if it exists."""
        shutil.rmtree(self.root / directory, ignore_errors=True)

    def remove_unreferenced(self, referenced: Iterable[str]) -> int:
        """Delete every weight directory, savepoint and asset that is not in ``referenced``; returns how many."""
        kept = {self.root / path for path in referenced}
        found = [
            *self.root.glob(f"{CHECKPOINTS}/*/*/*"),
            *self.root.glob(f"{SNAPSHOTS}/*"),
            *self.root.glob(f"{DOWNLOADS}/*"),
        ]
        directories = [directory for directory in found if directory not in kept]
        for directory in directories:
            shutil.rmtree(directory, ignore_errors=True)
        files = [
            file
            for folder in (SAVEPOINTS, ASSETS)
            for file in self.root.glob(f"{folder}/*")
            if file not in kept
        ]
        for file in files:
            file.unlink(missing_ok=True)
        return len(directories) + len(files)


def _size(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
