from __future__ import annotations

from pathlib import Path

import pytest

from tinkex.cli.invocation import Invocation
from tinkex.errors import ConfigError, MissingApiKeyError, SetupError


@pytest.fixture(autouse=True)
def nobody_is_logged_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("TINKER_API_KEY", "TINKER_CREDENTIAL_CMD", "TINKER_BASE_URL"):
        monkeypatch.delenv(name, raising=False)


def test_a_missing_key_names_the_command_that_stores_one() -> None:
    with pytest.raises(SetupError) as raised:
        Invocation(base_url="http://127.0.0.1:1").config()
    assert str(raised.value).endswith("or log in with: tinkex auth login --base-url http://127.0.0.1:1")
    assert "--local" not in str(raised.value), "what is on that server is not on this machine"
    assert isinstance(raised.value.__cause__, MissingApiKeyError)
    with pytest.raises(
        SetupError, match=r"with --local, which needs no key, or log in with: tinkex auth login$"
    ):
        Invocation().config()


def test_other_wrong_settings_stay_what_they_are() -> None:
    with pytest.raises(ConfigError, match="start with 'tml-'"):
        Invocation(base_url="http://127.0.0.1:1", api_key="no API key").config()
