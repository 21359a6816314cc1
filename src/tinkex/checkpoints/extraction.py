"""Unpacking archives that somebody else made: only plain files and folders, only below the target, only so much."""

from __future__ import annotations

import os
import shutil
import tarfile
from pathlib import Path, PurePosixPath

from tinkex.errors import SetupError

__all__ = ["MAX_FILES", "MAX_UNPACKED_BYTES", "extract"]

MAX_UNPACKED_BYTES = 1 << 40
MAX_FILES = 10_000
CHUNK = 1 << 20


def extract(
    archive: Path,
    directory: Path,
    *,
    max_bytes: int = MAX_UNPACKED_BYTES,
    max_files: int = MAX_FILES,
) -> list[Path]:
    """Unpacks a tar file (plain, gzip, bzip2 or xz) into ``directory``, which must be new, and returns its files.

    Links, devices, absolute names and names that leave the directory are refused before anything of them is written;
    modes and owners of the archive are not taken over. If anything is wrong, ``directory`` is removed again.

    Example:
        >>> extract(Path("adapter.tar"), Path("adapter"))
        [PosixPath('adapter/adapter_config.json'), PosixPath('adapter/adapter_model.safetensors')]
    """
    directory.mkdir(parents=True)
    try:
        return _extract(archive, directory, max_bytes, max_files)
    except (tarfile.TarError, EOFError) as error:
        shutil.rmtree(directory, ignore_errors=True)
        raise SetupError(f"{archive.name} is no whole tar archive ({error}); fetch it again") from error
    except OSError as error:
        shutil.rmtree(directory, ignore_errors=True)
        raise SetupError(
            f"{archive.name} cannot be unpacked into {directory} ({error.strerror or error}); make room there"
        ) from error
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise


def _extract(archive: Path, directory: Path, max_bytes: int, max_files: int) -> list[Path]:
    files: list[Path] = []
    seen: set[PurePosixPath] = set()
    left = min(max_bytes, shutil.disk_usage(directory).free)
    with tarfile.open(archive, "r:*") as opened:
        for number, member in enumerate(opened):
            if number >= max_files:
                raise SetupError(f"{archive.name} holds more than {max_files} entries; it is not unpacked")
            path = _safe(archive, member)
            if path in seen:
                raise SetupError(f"{archive.name} holds {member.name!r} twice; it is not unpacked")
            seen.add(path)
            target = directory.joinpath(*path.parts)
            if member.isdir():
                target.mkdir(parents=True, exist_ok=True)
                continue
            left -= member.size
            if left < 0:
                raise SetupError(
                    f"{archive.name} unpacks to more than {max_bytes:,} bytes or than the disk has free; "
                    "it is not unpacked"
                )
            target.parent.mkdir(parents=True, exist_ok=True)
            _write(opened, member, target)
            files.append(target)
    return files


def _safe(archive: Path, member: tarfile.TarInfo) -> PurePosixPath:
    """The member's path below the target, or a refusal that names it."""
    path = PurePosixPath(member.name)
    strange = (
        "\\" in member.name or "\0" in member.name or ":" in path.parts[0]
        if path.parts
        else member.name not in {".", "./"}
    )
    if path.is_absolute() or ".." in path.parts or strange:
        raise SetupError(
            f"{archive.name} holds {member.name!r}, which leads out of its folder; it is not unpacked"
        )
    if not (member.isreg() or member.isdir()) or member.issparse():
        raise SetupError(
            f"{archive.name} holds {member.name!r}, which is no plain file but a link, a device or the like; "
            "it is not unpacked"
        )
    return path


def _write(opened: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> None:
    content = opened.extractfile(member)
    assert content is not None, "it is a plain file"
    # Never through a link, and never over a file that is there.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    with content, os.fdopen(os.open(target, flags, 0o644), "wb") as file:
        shutil.copyfileobj(content, file, CHUNK)
        if file.tell() != member.size:
            raise EOFError(f"{member.name} is cut short")
