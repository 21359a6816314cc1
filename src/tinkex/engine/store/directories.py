"""Weights on disk: directories that appear complete or not at all.

Layout under the data directory: ``checkpoints/<run>/<kind>/<name>``, ``snapshots/<number>`` and the files
``savepoints/<number>``, ``assets/<number>`` and ``downloads/<number>/<file>``. Everything is written under a temporary name, renamed, and only then mentioned by a row of the
database; what no row mentions is litter of a crash, and is cleared away at the next start.
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
    """The checkpoint name itself, or :class:`InvalidInput` that shows which characters it may have.

    >>> check_name("step-0010")
    'step-0010'
    """
    if _NAME.fullmatch(name) is None or not name.strip("."):
        raise InvalidInput(
            f"{name!r} cannot name a checkpoint; use 1 to 128 letters, digits, '.', '_' and '-', such as 'step-0010'."
        )
    return name


@dataclass
class Writing:
    """A directory being written: files go into ``temporary``; ``final`` is where it ends up."""

    temporary: Path
    final: str
    size_bytes: int = 0


class Directories:
    """Writes, finds and removes weight directories below one root."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def resolve(self, directory: str) -> Path:
        """The absolute place of a stored directory."""
        return self.root / directory

    @contextmanager
    def checkpoint(self, run_id: str, kind: str, name: str) -> Iterator[Writing]:
        """Write a checkpoint; it is there, with its size, when the block ends without an error."""
        # ':' is part of every run id and not allowed in names on every file system.
        parent = f"{CHECKPOINTS}/{run_id.replace(':', '~')}/{kind}"
        final = f"{parent}/{check_name(name)}"
        if (self.root / final).exists():
            # The old one stays readable until the database points to the new one; '@' cannot occur in a name.
            final = f"{final}@{secrets.token_hex(4)}"
        with self._write(parent, final) as writing:
            yield writing

    @contextmanager
    def snapshot(self) -> Iterator[Writing]:
        """Write an unnamed snapshot, under a name nobody chose."""
        with self._write(SNAPSHOTS, f"{SNAPSHOTS}/{secrets.token_hex(8)}") as writing:
            yield writing

    @contextmanager
    def _write(self, parent: str, final: str) -> Iterator[Writing]:
        folder = self.root / parent
        folder.mkdir(parents=True, exist_ok=True)
        writing = Writing(folder / f"{_UNFINISHED}{secrets.token_hex(8)}", final)
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
            raise OSError(str(error)) from error  # it writes by itself, and has an error of its own for that
        except BaseException:
            shutil.rmtree(writing.temporary, ignore_errors=True)
            raise

    @contextmanager
    def savepoint(self) -> Iterator[Writing]:
        """Write a savepoint: one file, which is on disk under its final name when the block ends without an error."""
        folder = self.root / SAVEPOINTS
        folder.mkdir(exist_ok=True)
        number = secrets.token_hex(8)
        writing = Writing(folder / f"{_UNFINISHED}{number}", f"{SAVEPOINTS}/{number}")
        try:
            yield writing
            flush_path(writing.temporary)
            writing.size_bytes = writing.temporary.stat().st_size
            writing.temporary.rename(self.root / writing.final)
            flush_path(folder)
        except BaseException:
            writing.temporary.unlink(missing_ok=True)
            raise

    def new_asset(self) -> Path:
        """Where an upload is written while it arrives; it is kept by :meth:`keep_asset`, or yours to delete."""
        folder = self.root / ASSETS
        folder.mkdir(exist_ok=True)
        return folder / f"{_UNFINISHED}{secrets.token_hex(8)}"

    def keep_asset(self, temporary: Path) -> str:
        """Put a whole upload on disk under a name nobody chose, which is returned."""
        flush_path(temporary)
        final = f"{ASSETS}/{secrets.token_hex(8)}"
        temporary.rename(self.root / final)
        flush_path(temporary.parent)
        return final

    def remove_asset(self, file: str) -> None:
        """Delete the file of an asset; one that is gone already is fine."""
        (self.root / file).unlink(missing_ok=True)

    def downloads(self) -> Path:
        """Where files lie that callers in this process were told to read, each in a folder of its own."""
        folder = self.root / DOWNLOADS
        folder.mkdir(exist_ok=True)
        return folder

    def clear_downloads(self, before: float) -> None:
        """Delete what callers were told to read before the given moment."""
        for folder in self.root.glob(f"{DOWNLOADS}/*"):
            if folder.stat().st_mtime < before:
                shutil.rmtree(folder, ignore_errors=True)

    def remove_savepoint(self, file: str) -> None:
        """Delete the file of a savepoint; one that is gone already is fine."""
        (self.root / file).unlink(missing_ok=True)

    def size(self, directory: str) -> int | None:
        """How many bytes the files of a stored directory have, or None if it is not there."""
        path = self.root / directory
        return _size(path) if path.is_dir() else None

    def remove(self, directory: str) -> None:
        """Delete a directory; one that is gone already is fine."""
        shutil.rmtree(self.root / directory, ignore_errors=True)

    def clear_litter(self, known: Iterable[str]) -> int:
        """Delete every weight directory, savepoint and asset that ``known`` does not name; says how many."""
        kept = {self.root / directory for directory in known}
        found = [
            *self.root.glob(f"{CHECKPOINTS}/*/*/*"),
            *self.root.glob(f"{SNAPSHOTS}/*"),
            *self.root.glob(f"{DOWNLOADS}/*"),
        ]
        litter = [directory for directory in found if directory not in kept]
        for directory in litter:
            shutil.rmtree(directory, ignore_errors=True)
        files = [
            file
            for folder in (SAVEPOINTS, ASSETS)
            for file in self.root.glob(f"{folder}/*")
            if file not in kept
        ]
        for file in files:
            file.unlink(missing_ok=True)
        return len(litter) + len(files)


def _size(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
