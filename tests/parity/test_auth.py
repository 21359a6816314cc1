"""`tinkex.auth` answers as `tinker.auth` does, whatever is configured on the machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tinker

import tinkex
from tests.servers import ServedEngine

pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)  # the official client leaves sockets to the garbage collector

KEY, STORED = "tml-from-the-environment", "tml-from-the-file"


def store(home: Path, text: str) -> None:
    folder = home / ".tinker"
    folder.mkdir(mode=0o700)
    file = folder / "credentials.json"
    file.write_text(text)
    file.chmod(0o600)


CREDENTIALS = {
    "version": 1,
    "default": "a",
    "keys": {"a": {"type": "manual", "key": STORED, "name": "mine"}},
}


@pytest.mark.parametrize("key", [None, "", KEY, "sk-of-somebody-else"])
@pytest.mark.parametrize("command", [None, "echo tml-printed"])
@pytest.mark.parametrize("stored", [None, CREDENTIALS, {**CREDENTIALS, "default": None}, "broken"])
def test_the_token_and_whether_there_is_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, key: str | None, command: str | None, stored: object
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("TINKER_BASE_URL", raising=False)
    for name, value in (("TINKER_API_KEY", key), ("TINKER_CREDENTIAL_CMD", command)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    if stored is not None:
        store(tmp_path, stored if isinstance(stored, str) else json.dumps(stored))
    assert tinkex.auth.get_tinker_token() == tinker.auth.get_tinker_token()
    assert tinkex.auth.tinker_has_credentials() == tinker.auth.tinker_has_credentials()


def test_a_server_that_does_not_answer_is_not_accessible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    monkeypatch.setenv("TINKER_BASE_URL", "http://127.0.0.1:9")
    with pytest.raises(tinkex.APIConnectionError):
        tinkex.auth.raise_if_tinker_not_accessible()


def test_without_a_key_nothing_is_accessible(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("TINKER_API_KEY", "TINKER_CREDENTIAL_CMD", "TINKER_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(tinkex.TinkerError, match="TINKER_API_KEY"):
        tinkex.auth.raise_if_tinker_not_accessible()


def test_a_server_says_whether_it_takes_the_key(
    monkeypatch: pytest.MonkeyPatch, served_engine: ServedEngine
) -> None:
    monkeypatch.setenv("TINKER_BASE_URL", served_engine.url)
    for package in (tinker, tinkex):
        monkeypatch.setenv("TINKER_API_KEY", served_engine.key)
        package.auth.raise_if_tinker_not_accessible()
        monkeypatch.setenv("TINKER_API_KEY", "tml-of-somebody-else")
        with pytest.raises(package.AuthenticationError):
            package.auth.raise_if_tinker_not_accessible()
