from __future__ import annotations

from pathlib import Path

import pytest

from tinkex.engine.api.embedded import open_embedded
from tinkex.errors import SetupError


def test_environment_variables_set_models_and_data_directory(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKEX_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TINKEX_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("TINKEX_MODELS", f"one={tiny_model}, two={tiny_model}")
    embedded = open_embedded()
    try:
        assert list(embedded.engine.models.names) == ["one", "two"]
        assert (tmp_path / "data").is_dir()
        assert not (tmp_path / "home" / "engine").exists()
    finally:
        embedded.close()


def test_users_of_one_home_share_an_engine_until_the_last_closes(tmp_path: Path, tiny_model: Path) -> None:
    models = {"tiny": str(tiny_model)}
    first, second = open_embedded(tmp_path, models), open_embedded(tmp_path, models)
    assert first is second
    first.close()
    assert not second.engine.closed
    second.close()
    assert second.engine.closed
    again = open_embedded(tmp_path, models)
    assert again is not first
    again.close()


def test_one_name_for_two_models_is_rejected(tmp_path: Path, tiny_model: Path) -> None:
    embedded = open_embedded(tmp_path, {"tiny": str(tiny_model)})
    try:
        with pytest.raises(SetupError, match="is used for"):
            open_embedded(tmp_path, {"tiny": str(tmp_path)})
    finally:
        embedded.close()
