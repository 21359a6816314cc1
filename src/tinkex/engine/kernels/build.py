"""Compiles the core with the C compiler at hand.

Run by the package's build hook, which loads this file by its path: it imports nothing but the standard library.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

__all__ = ["LIBRARY", "SOURCES", "BuildError", "build_core", "sources_digest"]

SOURCES = Path(__file__).parent / "csrc"
LIBRARY = Path(__file__).parent / "_core.so"

_FLAGS = (
    "-O3",
    "-std=gnu11",
    "-fPIC",
    "-pthread",
    "-fvisibility=hidden",
    "-ffp-contract=fast",
    "-Wall",
    "-Wextra",
)
_X86 = {"x86_64", "amd64"}
_X86_VARIANTS = {"avx2": ("-mavx2", "-mfma", "-mf16c"), "avx512": ("-mavx512f", "-mfma")}


class BuildError(Exception):
    """The core could not be compiled; the message says why."""


def sources_digest(sources: Path = SOURCES) -> str:
    """What the sources are, in a few letters; a library carries that of the ones it was built from."""
    digest = hashlib.sha256()
    for path in sorted(sources.glob("*.[ch]")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def build_core(target: Path = LIBRARY, *, extra_flags: tuple[str, ...] = ()) -> Path:
    """Compiles the core into ``target``, and returns it.

    ``$CC`` names the compiler; without it ``cc``, ``gcc`` and ``clang`` are tried.
    """
    compiler = _find_compiler()
    x86 = platform.machine().lower() in _X86
    variants: dict[str, tuple[str, ...]] = {"portable": (), **(_X86_VARIANTS if x86 else {})}
    with tempfile.TemporaryDirectory() as directory:
        objects = []
        units: list[tuple[str, str, tuple[str, ...]]] = [
            ("variant.c", name, (f"-DVARIANT={name}", *flags)) for name, flags in variants.items()
        ]
        described = (f'-DTINKEX_SOURCES="{sources_digest()}"', *(("-DTINKEX_X86",) if x86 else ()))
        units += [("pool.c", "pool", ()), ("api.c", "api", described)]
        for source, name, flags in units:
            compiled = Path(directory) / f"{name}.o"
            command = [*_FLAGS, *extra_flags, *flags, "-c", str(SOURCES / source), "-o", str(compiled)]
            _run([*compiler, *command])
            objects.append(str(compiled))
        # Written beside its place and renamed, so that a process that has the old one open keeps it.
        fresh = target.with_name(f".{target.name}.{os.getpid()}")
        _run([*compiler, "-shared", "-pthread", "-o", str(fresh), *objects, "-lm"])
        fresh.replace(target)
    return target


def _find_compiler() -> list[str]:
    chosen = os.environ.get("CC")
    if chosen:
        return shlex.split(chosen)
    for name in ("cc", "gcc", "clang"):
        found = shutil.which(name)
        if found:
            return [found]
    raise BuildError("no C compiler was found (cc, gcc or clang, or the one $CC names)")


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 -- our own command
    except OSError as error:
        raise BuildError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        raise BuildError(f"{' '.join(command)} failed:\n{done.stderr.strip()}")
