"""Extracts untrusted archives: only regular files and directories, only below the target, within limits."""

from __future__ import annotations

import os
import shutil
import tarfile
from pathlib import Path, PurePosixPath

from tinkex.errors import SetupError

__all__ = ["MAX_FILES", "MAX_UNPACKED_BYTES", "extract"]

MAX_UNPACKED_BYTES = 1 << 40
MAX_FILES = 10_000
COPY_BYTES = 1 << 20


def extract(
    archive: Path,
    directory: Path,
    *,
    max_bytes: int = MAX_UNPACKED_BYTES,
    max_files: int = MAX_FILES,
) -> list[Path]:
    """Extracts a tar file (plain, gzip, bzip2 or xz) into ``directory``, which must not exist, and returns its files.

    Links, devices, absolute names and names outside of the directory are rejected before anything of them is written;
    modes and owners in the archive are ignored. After an error ``directory`` is removed.

    Example:
        >>> extract(Path("adapter.tar"), Path("adapter"))
        [PosixPath('adapter/adapter_config.json'), PosixPath('adapter/adapter_model.safetensors')]
    """
    directory.mkdir(parents=True)
    try:
        return _extract(archive, directory, max_bytes, max_files)
    except (tarfile.TarError, EOFError) as error:
        shutil.rmtree(directory, ignore_errors=True)
        raise SetupError(
            f"{archive.name} is not a complete tar archive ({error}); download it again"
        ) from error
    except OSError as error:
        shutil.rmtree(directory, ignore_errors=True)
        raise SetupError(
            f"{archive.name} cannot be extracted into {directory} ({error.strerror or error}); free some space there"
        ) from error
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise


def _extract(archive: Path, directory: Path, max_bytes: int, max_files: int) -> list[Path]:
    files: list[Path] = []
    seen: set[PurePosixPath] = set()
    remaining = min(max_bytes, shutil.disk_usage(directory).free)
    with tarfile.open(archive, "r:*") as opened:
        for number, member in enumerate(opened):
            if number >= max_files:
                raise SetupError(f"{archive.name} has more than {max_files} entries; it was not extracted")
            path = _safe(archive, member)
            if path in seen:
                raise SetupError(f"{archive.name} has two entries {member.name!r}; it was not extracted")
            seen.add(path)
            target = directory.joinpath(*path.parts)
            if member.isdir():
                target.mkdir(parents=True, exist_ok=True)
                continue
            remaining -= member.size
            if remaining < 0:
                raise SetupError(
                    f"{archive.name} extracts to more than {max_bytes:,} bytes, or more than the disk has free; "
                    "it was not extracted"
                )
            target.parent.mkdir(parents=True, exist_ok=True)
            _write(opened, member, target)
            files.append(target)
    return files


def _safe(archive: Path, member: tarfile.TarInfo) -> PurePosixPath:
    """The path of a member below the target; raises ``SetupError`` if it is outside, or not a file or directory."""
    path = PurePosixPath(member.name)
    invalid = (
        "\\" in member.name or "\0" in member.name or ":" in path.parts[0]
        if path.parts
        else member.name not in {".", "./"}
    )
    if path.is_absolute() or ".." in path.parts or invalid:
        raise SetupError(
            f"{archive.name} has an entry {member.name!r} outside of its directory; it was not extracted"
        )
    if not (member.isreg() or member.isdir()) or member.issparse():
        raise SetupError(
            f"{archive.name} has an entry {member.name!r} that is neither a regular file nor a directory; "
            "it was not extracted"
        )
    return path


def _write(opened: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> None:
    content = opened.extractfile(member)
    assert content is not None, "it is a regular file"
    # Never through a link, and never over an existing file.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    with content, os.fdopen(os.open(target, flags, 0o644), "wb") as file:
        shutil.copyfileobj(content, file, COPY_BYTES)
        if file.tell() != member.size:
            raise EOFError(f"{member.name} is truncated")
