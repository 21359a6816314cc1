"""Compiles the core with the C compiler of the machine.

The package's build hook loads this file by its path, so it imports only the standard library.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

__all__ = [
    "LIBRARY",
    "SOURCES",
    "BuildError",
    "build_core",
    "build_error_file",
    "build_for_package",
    "sources_digest",
]

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
# Every variant starts from the baseline of the architecture, even if the compiler has another default.
_X86_BASELINE = ("-march=x86-64",)
_X86_VARIANTS = {"avx2": ("-mavx2", "-mfma", "-mf16c"), "avx512": ("-mavx512f", "-mfma")}


class BuildError(Exception):
    """The core could not be compiled; the first line of the message says why."""


def sources_digest(sources: Path = SOURCES) -> str:
    """A hash of the sources; a library carries the hash of those it was built from."""
    digest = hashlib.sha256()
    for path in sorted(sources.glob("*.[ch]")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def build_core(target: Path = LIBRARY, *, extra_flags: tuple[str, ...] = ()) -> Path:
    """Compiles the core into ``target``, for the machine the compiler targets, and returns ``target``.

    ``$CC`` names the compiler; without it ``cc``, ``gcc`` and ``clang`` are tried.
    """
    compiler = _find_compiler()
    x86 = _run([*compiler, "-dumpmachine"]).startswith(("x86_64", "amd64"))
    variants: dict[str, tuple[str, ...]] = {"portable": ()}
    if x86:
        variants |= _X86_VARIANTS
        extra_flags = (*_X86_BASELINE, *extra_flags)
    with tempfile.TemporaryDirectory() as directory:
        described = (f'-DTINKEX_SOURCES="{sources_digest()}"', *(("-DTINKEX_X86",) if x86 else ()))
        units: list[tuple[str, str, tuple[str, ...]]] = [
            *(("variant.c", name, (f"-DVARIANT={name}", *flags)) for name, flags in variants.items()),
            ("pool.c", "pool", ()),
            ("api.c", "api", described),
        ]

        def compile_unit(unit: tuple[str, str, tuple[str, ...]]) -> str:
            source, name, flags = unit
            compiled = str(Path(directory) / f"{name}.o")
            command = [*_FLAGS, *extra_flags, *flags, "-c", str(SOURCES / source), "-o", compiled]
            _run([*compiler, *command])
            return compiled

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compile_unit, units))
        # Linked under another name and renamed, so that a process that has the old library open keeps it.
        fresh = target.with_name(f".{target.name}.{os.getpid()}")
        _run([*compiler, "-shared", "-pthread", "-o", str(fresh), *objects, "-lm"])
        fresh.replace(target)
    return target


def build_error_file(library: Path = LIBRARY) -> Path:
    """The file beside ``library`` that says why the package was built without it."""
    return library.with_name("_core_error.txt")


def build_for_package(target: Path = LIBRARY) -> Path:
    """Compiles the core into ``target``; where that fails, records the reason. Returns the file that it wrote.

    Example:
        >>> build_for_package().name  # without a C compiler: '_core_error.txt'
        '_core.so'
    """
    error_file = build_error_file(target)
    try:
        build_core(target)
    except BuildError as error:
        target.unlink(missing_ok=True)  # it was built from other sources
        error_file.write_text(f"{error}\n", encoding="utf-8")
        return error_file
    error_file.unlink(missing_ok=True)
    return target


def _find_compiler() -> list[str]:
    chosen = os.environ.get("CC")
    if chosen:
        return shlex.split(chosen)
    for name in ("cc", "gcc", "clang"):
        found = shutil.which(name)
        if found:
            return [found]
    raise BuildError("no C compiler was found: neither cc, gcc nor clang, and $CC is not set")


def _run(command: list[str]) -> str:
    """The output of a command of the compiler."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 -- our own command
    except OSError as error:
        raise BuildError(f"the C compiler {command[0]} cannot be run: {error}") from error
    if done.returncode:
        messages = done.stderr.strip()
        first_error = next((line for line in messages.splitlines() if "error" in line), "no error message")
        raise BuildError(f"{command[0]} failed: {first_error}\n{' '.join(command)}\n{messages}")
    return done.stdout
