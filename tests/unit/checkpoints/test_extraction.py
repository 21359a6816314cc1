from __future__ import annotations

import io
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.checkpoints import extract
from tinkex.errors import SetupError


def archive(path: Path, *members: tarfile.TarInfo, mode: str = "w") -> Path:
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        for member in members:
            tar.addfile(member, io.BytesIO(b"x" * member.size) if member.isreg() else None)
    return path


def plain(name: str, size: int = 3) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size = size
    return member


def special(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz"])
def test_regular_files_and_directories_are_extracted(mode: str, tmp_path: Path) -> None:
    folder = special("sub", tarfile.DIRTYPE)
    member = plain("sub/b.txt")
    member.mode = 0o4777
    made = archive(tmp_path / "a.tar", plain("./a.txt"), folder, member, mode=mode)
    files = extract(str(made), str(tmp_path / "out"))
    assert sorted(file.relative_to(tmp_path / "out").as_posix() for file in files) == ["a.txt", "sub/b.txt"]
    assert (tmp_path / "out/sub/b.txt").read_bytes() == b"xxx"
    assert (tmp_path / "out/sub/b.txt").stat().st_mode & 0o7111 == 0


@pytest.mark.parametrize(
    "bad",
    [
        lambda: plain("/etc/evil"),
        lambda: plain("../evil"),
        lambda: plain("a/../../evil"),
        lambda: plain("C:/evil"),
        lambda: plain("a\\..\\evil"),
        lambda: special("link", tarfile.SYMTYPE, "/etc/passwd"),
        lambda: special("link", tarfile.SYMTYPE, "a.txt"),
        lambda: special("hard", tarfile.LNKTYPE, "a.txt"),
        lambda: special("device", tarfile.CHRTYPE),
        lambda: special("block", tarfile.BLKTYPE),
        lambda: special("pipe", tarfile.FIFOTYPE),
        lambda: plain("a.txt"),
    ],
    ids=["absolute", "parent", "inner parent", "drive", "backslash", "symlink out", "symlink in", "hard link",
         "character device", "block device", "pipe", "twice"],
)  # fmt: skip
def test_an_unsafe_entry_is_rejected_and_nothing_is_left(
    bad: Callable[[], tarfile.TarInfo], tmp_path: Path
) -> None:
    made = archive(tmp_path / "a.tar", plain("a.txt"), bad())
    with pytest.raises(SetupError, match="not extracted"):
        extract(made, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tar"]


def test_size_and_number_of_files_are_bounded(tmp_path: Path) -> None:
    made = archive(tmp_path / "a.tar.gz", plain("zeros", 5_000_000), mode="w:gz")
    with pytest.raises(SetupError, match="more than 1,000,000"):
        extract(made, tmp_path / "out", max_bytes=1_000_000)
    many = archive(tmp_path / "many.tar", *(plain(f"{number}", 0) for number in range(5)))
    with pytest.raises(SetupError, match="more than 4"):
        extract(many, tmp_path / "out", max_files=4)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz"])
@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_a_long_name_is_rejected_before_it_is_read(mode: str, form: int, tmp_path: Path) -> None:
    made = tmp_path / "a.tar"
    with tarfile.open(made, mode, format=form) as tar:  # type: ignore[call-overload]
        tar.addfile(plain("n" * 32_000_000, 0))
    tracemalloc.start()
    try:
        with pytest.raises(SetupError, match="a header has 32,0"):
            extract(made, tmp_path / "out")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16_000_000  # of which the dictionary of xz takes 8 MB
    assert not (tmp_path / "out").exists()


def test_names_are_no_longer_than_a_file_system_has_them(tmp_path: Path) -> None:
    longest = "/".join(["d" * 200] * 5)[:1024]
    made = archive(tmp_path / "a.tar", plain(longest), plain("x" * 1025))
    with pytest.raises(SetupError, match="a name of 1,025 characters"):
        extract(made, tmp_path / "out")


def test_headers_that_only_announce_further_headers_are_an_error(tmp_path: Path) -> None:
    header = tarfile.TarInfo("././@LongLink")
    header.type, header.size = tarfile.GNUTYPE_LONGNAME, 1
    made = tmp_path / "a.tar"
    made.write_bytes((header.tobuf() + b"n" + bytes(511)) * 5000)
    with pytest.raises(SetupError, match="not a complete tar archive"):
        extract(made, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@given(cut=st.integers(1, 4000), seed=st.integers(0, 255))
def test_a_corrupt_archive_is_an_error_and_nothing_is_left(
    cut: int, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    made = archive(folder / "a.tar", plain("a", 2000), plain("b", 2000))
    made.write_bytes(made.read_bytes()[:cut])
    try:
        files = extract(made, folder / "out")
    except SetupError:
        assert not (folder / "out").exists()
    else:
        assert [file.stat().st_size for file in files] == [2000] * len(files)


def test_a_file_that_is_not_an_archive_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_text("<html>")
    with pytest.raises(SetupError, match="not a complete tar archive"):
        extract(tmp_path / "a.tar", tmp_path / "out")
