"""Archives that are never written: right in every part, and nothing but plain files."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.engine.api.archives import Archive


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("archive")
    (folder / "empty").write_bytes(b"")
    (folder / "block").write_bytes(b"b" * 512)
    (folder / "large").write_bytes(bytes(range(256)) * 40)
    (folder / ("n" * 120)).write_bytes(b"a long name")
    (folder / "inner").mkdir()
    (folder / "inner" / "hidden").write_bytes(b"no")
    (folder / "link").symlink_to("/etc/hostname")
    return folder


def test_plain_files_are_in_it_and_nothing_else(directory: Path) -> None:
    archive = Archive(directory)
    content = b"".join(archive.read(0, archive.size))
    assert len(content) == archive.size
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        assert sorted(tar.getnames()) == sorted(["block", "empty", "large", "n" * 120])
        for member in tar.getmembers():
            extracted = tar.extractfile(member)
            assert extracted is not None
            assert extracted.read() == (directory / member.name).read_bytes()


@given(st.integers(0, 20_000), st.integers(0, 20_000))
def test_every_part_is_a_part_of_the_whole(directory: Path, start: int, stop: int) -> None:
    archive = Archive(directory)
    whole = b"".join(archive.read(0, archive.size))
    assert b"".join(archive.read(start, min(stop, archive.size))) == whole[start:stop]


def test_a_file_that_shrank_breaks_the_stream_instead_of_lying(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 1000)
    archive = Archive(tmp_path)
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(EOFError):
        list(archive.read(0, archive.size))
