from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tinkex.engine.model.cache import ModelCache
from tinkex.errors import SetupError


def _make(partial: Path) -> None:
    (partial / "config.json").write_text("{}")


def _unneeded(partial: Path) -> None:
    raise AssertionError("it is there already")


def test_a_model_is_made_once(tmp_path: Path) -> None:
    cache = ModelCache(tmp_path)
    assert cache.find("model") is None
    directory = cache.obtain("model", _make)
    assert directory == cache.find("model") == cache.directory("model")
    assert cache.obtain("model", _unneeded) == directory


def test_a_half_made_model_is_never_seen(tmp_path: Path) -> None:
    cache = ModelCache(tmp_path)

    def fail(partial: Path) -> None:
        _make(partial)
        assert cache.find("model") is None
        raise SetupError("the line went dead")

    with pytest.raises(SetupError, match="the line went dead"):
        cache.obtain("model", fail)
    assert cache.find("model") is None


def test_leftovers_are_removed_or_handed_on(tmp_path: Path) -> None:
    cache = ModelCache(tmp_path)
    seen: list[list[str]] = []

    def fail(partial: Path) -> None:
        (partial / "leftover").write_text("half")
        raise SetupError("stopped")

    def look(partial: Path) -> None:
        seen.append(sorted(path.name for path in partial.iterdir()))
        _make(partial)

    for key, resume in (("fresh", False), ("resumed", True)):
        with pytest.raises(SetupError):
            cache.obtain(key, fail, resume=resume)
        cache.obtain(key, look, resume=resume)
    assert seen == [[], ["leftover"]]


def test_a_second_builder_waits_and_uses_the_result_of_the_first(tmp_path: Path) -> None:
    cache = ModelCache(tmp_path)
    building, waiting = threading.Event(), threading.Event()
    made: list[str] = []

    def make(partial: Path) -> None:
        building.set()
        assert waiting.wait(10)
        made.append("first")
        _make(partial)

    first = threading.Thread(target=cache.obtain, args=("model", make))
    first.start()
    assert building.wait(10)

    def progress(phase: str, done: int, total: int | None) -> None:
        if phase.startswith("waiting for another process"):
            waiting.set()

    cache.obtain("model", _unneeded, progress=progress)
    first.join(10)
    assert made == ["first"]
    assert cache.find("model") is not None


def test_a_directory_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(SetupError, match=r"is not a model directory \(no config\.json\); remove it"):
        ModelCache(tmp_path).obtain("model", _make)


def test_a_home_that_cannot_be_written_is_a_setup_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(SetupError, match="set TINKEX_HOME"):
        ModelCache(tmp_path / "file" / "models").obtain("model", _make)
