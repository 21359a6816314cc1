"""Weight directories and files on disk, written atomically.

Layout under the data directory: ``checkpoints/<run>/<kind>/<name>``, ``snapshots/<number>`` and the files
``savepoints/<number>``, ``assets/<number>``, ``downloads/<number>/<file>`` and ``uploads/<upload>/<file>``. Everything else than
an upload, which grows in place, is written under a temporary name, flushed and renamed before a row of the database refers to
it. Files that no row refers to were left by a crash and are removed at the next start.
"""

from __future__ import annotations

import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
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
UPLOADS = "uploads"
MANIFEST_FILE = "manifest.json"
"""Lists the files of a checkpoint with their digests."""
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
    """Writes, finds and removes weight directories under one root; ``flush`` flushes a file or directory to disk."""

    def __init__(self, root: Path, flush: Callable[[Path], None] = flush_path) -> None:
        self.root = root
        self._flush = flush

    def resolve(self, directory: str) -> Path:
        """Returns the absolute path of a stored directory."""
        return self.root / directory

    @contextmanager
    def checkpoint(
        self, run_id: str, kind: str, name: str, check_size: Callable[[int], None] | None = None
    ) -> Iterator[StagedWrite]:
        """Write a checkpoint; it is complete on disk when the block ends without an error.

        ``check_size`` is called with its size, and raises to discard it.
        """
        # ':' is part of every run id, and not every file system allows it in names.
        parent = f"{CHECKPOINTS}/{run_id.replace(':', '~')}/{kind}"
        final = f"{parent}/{check_name(name)}"
        if (self.root / final).exists():
            # The old one stays readable until the database refers to the new one; '@' is not valid in a name.
            final = f"{final}@{secrets.token_hex(4)}"
        with self._write(parent, final, check_size) as writing:
            yield writing

    @contextmanager
    def snapshot(self, check_size: Callable[[int], None] | None = None) -> Iterator[StagedWrite]:
        """Write an unnamed snapshot to a directory with a random name."""
        with self._write(SNAPSHOTS, f"{SNAPSHOTS}/{secrets.token_hex(8)}", check_size) as writing:
            yield writing

    @contextmanager
    def _write(
        self, parent: str, final: str, check_size: Callable[[int], None] | None
    ) -> Iterator[StagedWrite]:
        folder = self._folder(parent)
        writing = StagedWrite(folder / f"{_UNFINISHED}{secrets.token_hex(8)}", final)
        writing.temporary.mkdir()
        try:
            yield writing
            writing.size_bytes = _size(writing.temporary)
            if check_size is not None:
                check_size(writing.size_bytes)
            for entry in writing.temporary.rglob("*"):
                self._flush(entry)
            self._flush(writing.temporary)
            writing.temporary.rename(self.root / final)
            self._flush(folder)
        except SafetensorError as error:
            shutil.rmtree(writing.temporary, ignore_errors=True)
            raise _os_error(error) from error
        except BaseException:
            shutil.rmtree(writing.temporary, ignore_errors=True)
            raise

    @contextmanager
    def savepoint(self) -> Iterator[StagedWrite]:
        """Write a savepoint file; it is on disk under its final name when the block ends without an error."""
        folder = self._folder(SAVEPOINTS)
        number = secrets.token_hex(8)
        writing = StagedWrite(folder / f"{_UNFINISHED}{number}", f"{SAVEPOINTS}/{number}")
        try:
            yield writing
            self._flush(writing.temporary)
            writing.size_bytes = writing.temporary.stat().st_size
            writing.temporary.rename(self.root / writing.final)
            self._flush(folder)
        except BaseException:
            writing.temporary.unlink(missing_ok=True)
            raise

    def new_asset_path(self) -> Path:
        """Returns a temporary path for an upload; the caller commits it with :meth:`commit_asset` or deletes it."""
        return self._folder(ASSETS) / f"{_UNFINISHED}{secrets.token_hex(8)}"

    def commit_asset(self, temporary: Path) -> str:
        """Flush a complete upload and rename it to a random name; returns that name."""
        self._flush(temporary)
        final = f"{ASSETS}/{secrets.token_hex(8)}"
        temporary.rename(self.root / final)
        self._flush(temporary.parent)
        return final

    def remove_asset(self, file: str) -> None:
        """Delete the file of an asset, if it exists."""
        (self.root / file).unlink(missing_ok=True)

    def create(self, directory: str) -> Path:
        """Returns the absolute path of a stored directory; creates it if it does not exist."""
        return self._folder(directory)

    def downloads(self) -> Path:
        """Returns the directory for files that callers in this process read, each in its own subdirectory."""
        return self._folder(DOWNLOADS)

    def _folder(self, name: str) -> Path:
        """Returns a directory under the root; creates it, and flushes its entry: a power failure would lose all in it."""
        folder = self.root / name
        missing = []
        directory = folder
        while not directory.is_dir():
            missing.append(directory)
            directory = directory.parent
        for directory in reversed(missing):
            directory.mkdir(exist_ok=True)
            self._flush(directory.parent)
        return folder

    def downloads_bytes(self) -> int:
        """Returns the total size of the downloads."""
        return _size(self.root / DOWNLOADS)

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
        """Delete every weight directory, savepoint, asset and upload that is not in ``referenced``; returns how many."""
        kept = {self.root / path for path in referenced}
        found = [
            *self.root.glob(f"{CHECKPOINTS}/*/*/*"),
            *self.root.glob(f"{SNAPSHOTS}/*"),
            *self.root.glob(f"{DOWNLOADS}/*"),
            *self.root.glob(f"{UPLOADS}/*"),
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


def _os_error(error: SafetensorError) -> OSError:
    """The system's error in an error of safetensors, which raises its own when a write fails.

    >>> _os_error(SafetensorError("Error while serializing: I/O error: Too many open files (os error 24)")).errno
    24
    """
    code = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(str(error)) if code is None else OSError(int(code[1]), str(error))
