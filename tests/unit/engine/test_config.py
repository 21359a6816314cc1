from __future__ import annotations

import math
from pathlib import Path

import pytest

from tinkex.engine.config import EngineConfig, tinkex_home
from tinkex.errors import SetupError


def test_home_comes_from_the_environment_or_the_home_directory() -> None:
    assert tinkex_home({"TINKEX_HOME": "/somewhere"}) == Path("/somewhere")
    assert tinkex_home({}) == Path.home() / ".tinkex"


def test_data_is_below_home_by_default(tmp_path: Path) -> None:
    assert EngineConfig(home=tmp_path).engine_dir == tmp_path / "engine"
    assert EngineConfig(home=tmp_path, data_dir=tmp_path / "d").engine_dir == tmp_path / "d"
    assert EngineConfig(home=tmp_path).models_home == tmp_path / "models"


def test_a_poll_longer_than_clients_wait_is_rejected() -> None:
    with pytest.raises(SetupError, match="45 s"):
        EngineConfig(long_poll_s=45.0)


def test_no_keys_on_a_public_address_is_rejected() -> None:
    EngineConfig(auth=False, host="127.0.0.1")
    with pytest.raises(SetupError, match="--no-auth"):
        EngineConfig(auth=False, host="0.0.0.0")


@pytest.mark.parametrize(
    "setting",
    [
        {"gap_timeout_s": 0.0},
        {"gap_timeout_s": math.nan},
        {"maintenance_interval_s": math.inf},
        {"maintenance_interval_s": 1e13},
        {"session_idle_s": math.nan},
        {"threads": 1025},
        {"max_body_bytes": 0},
        {"port": 70_000},
        {"max_tokens_per_pass": 0},
        {"kv_cache_bytes": 0},
    ],
)
def test_settings_without_sense_are_rejected_with_an_error_that_names_them(setting: dict[str, float]) -> None:
    with pytest.raises(SetupError, match=next(iter(setting))):
        EngineConfig(**setting)  # type: ignore[arg-type]


def test_what_computes_samples_comes_from_the_environment_and_is_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert EngineConfig().sampler_compute == "auto"
    monkeypatch.setenv("TINKEX_SAMPLER_COMPUTE", "torch")
    assert EngineConfig().sampler_compute == "torch"
    monkeypatch.setenv("TINKEX_SAMPLER_COMPUTE", "magic")
    with pytest.raises(SetupError, match="TINKEX_SAMPLER_COMPUTE"):
        EngineConfig()
