"""The core on processors other than this one, emulated: it uses only instructions they have, and computes the same."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.unit.engine.kernels.cores import CORES
from tinkex.engine.kernels.build import LIBRARY, SOURCES, build_core

SELFTEST = Path(__file__).with_name("selftest.c")
ON_X86 = platform.machine().lower() in {"x86_64", "amd64"}
ARM64_COMPILER = "aarch64-linux-gnu-gcc"


def linked(program: Path, compiler: str, library: Path) -> Path:
    """The self-test as ``program``, linked against a core."""
    flags = ["-O1", "-std=gnu11", "-Wall", "-Werror", f"-I{SOURCES}", f"-Wl,-rpath,{library.parent}"]
    subprocess.run(
        [compiler, *flags, str(SELFTEST), str(library), "-lm", "-o", str(program)],
        check=True,
    )
    return program


def variant_of(*command: str | Path) -> str:
    """Runs the self-test; returns the variant that it used."""
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stdout}{done.stderr}"
    variant, _ = done.stdout.split()
    return variant


@pytest.fixture(scope="module")
def selftest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not CORES or not shutil.which("cc"):
        pytest.skip("needs a C compiler and the compiled core")
    return linked(tmp_path_factory.mktemp("native") / "selftest", "cc", LIBRARY)


@pytest.mark.slow
def test_this_processor_computes_the_reference(selftest: Path) -> None:
    fastest = variant_of(selftest)
    assert fastest in {"avx512", "avx2", "portable"}
    for slower in {"avx512": ["avx2", "portable"], "avx2": ["portable"]}.get(fastest, []):
        assert variant_of(selftest, slower) == slower


@pytest.mark.slow
@pytest.mark.skipif(not ON_X86 or not shutil.which("qemu-x86_64"), reason="needs x86-64 and qemu-x86_64")
@pytest.mark.parametrize(
    ("processor", "variant"),
    [
        ("Nehalem", "portable"),  # no AVX
        ("SandyBridge", "portable"),  # AVX, but no AVX2
        ("Haswell", "avx2"),
        ("Haswell,-fma", "portable"),
        ("Haswell,-f16c", "portable"),  # as a virtual machine can show it
    ],
)
def test_an_x86_processor_gets_the_fastest_variant_it_can_run(
    selftest: Path, processor: str, variant: str
) -> None:
    assert variant_of("qemu-x86_64", "-cpu", processor, selftest) == variant


@pytest.mark.slow
@pytest.mark.skipif(
    not shutil.which(ARM64_COMPILER) or not shutil.which("qemu-aarch64"),
    reason=f"needs {ARM64_COMPILER} and qemu-aarch64",
)
def test_arm64_runs_the_portable_variant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", ARM64_COMPILER)
    library = build_core(tmp_path / "core.so", extra_flags=("-Werror",))
    program = linked(tmp_path / "selftest", ARM64_COMPILER, library)
    assert variant_of("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu", program) == "portable"
