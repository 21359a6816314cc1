from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tinkex.engine.kernels import CoreUnavailable, load_core
from tinkex.engine.kernels.build import (
    BuildError,
    build_core,
    build_error_file,
    build_for_package,
    sources_digest,
)

COMPILERS = ("cc", "gcc", "clang")
has_compiler = pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="no C compiler here")


def test_a_compiler_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/nowhere/cc --flag")
    with pytest.raises(BuildError, match="/nowhere/cc"):
        build_core(tmp_path / "core.so")
    assert not list(tmp_path.iterdir())


def test_no_compiler_at_all_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match="no C compiler"):
        build_core(tmp_path / "core.so")


@has_compiler
def test_what_the_compiler_reports_is_part_of_the_error(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="no-such-header"):
        build_core(tmp_path / "core.so", extra_flags=("-include", "no-such-header.h"))


@pytest.mark.slow
@has_compiler
def test_the_package_gets_the_core_without_a_warning_or_the_reason_why_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "core.so"
    monkeypatch.setenv("CC", "/nowhere/cc")
    assert build_for_package(library) == build_error_file(library)
    with pytest.raises(CoreUnavailable, match="/nowhere/cc cannot be run") as caught:
        load_core(library)
    assert "\n" not in str(caught.value)
    monkeypatch.setenv("CC", f"{next(filter(shutil.which, COMPILERS))} -Werror")
    assert build_for_package(library) == library
    assert list(tmp_path.iterdir()) == [library]
    assert load_core(library).variant in {"avx512", "avx2", "portable"}
    monkeypatch.setenv("CC", "/nowhere/cc")
    build_for_package(library)
    assert list(tmp_path.iterdir()) == [build_error_file(library)]


def test_other_sources_have_another_digest(tmp_path: Path) -> None:
    (tmp_path / "a.c").write_text("int a;")
    before = sources_digest(tmp_path)
    (tmp_path / "a.c").write_text("int b;")
    assert sources_digest(tmp_path) != before


def test_a_package_without_a_core_says_what_would_give_one(tmp_path: Path) -> None:
    with pytest.raises(CoreUnavailable, match="install a C compiler"):
        load_core(tmp_path / "core.so")


def test_a_file_that_is_not_a_library_is_rejected(tmp_path: Path) -> None:
    broken = tmp_path / "core.so"
    broken.write_bytes(b"not a library")
    with pytest.raises(CoreUnavailable, match="cannot be loaded"):
        load_core(broken)


@pytest.mark.slow
@has_compiler
def test_a_core_of_other_sources_is_rejected(tmp_path: Path) -> None:
    stale = build_core(tmp_path / "core.so", extra_flags=("-O0",))
    stale.write_bytes(stale.read_bytes().replace(sources_digest().encode(), b"0" * 16))
    with pytest.raises(CoreUnavailable, match="built from other sources"):
        load_core(stale)
