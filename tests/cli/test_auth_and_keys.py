"""Login, logout, API keys of a local server, and the doctor."""

from __future__ import annotations

import json
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.commands import Done, tinkex
from tests.servers import ServedEngine, serve
from tests.unit.engine.store.test_space import old_database
from tinkex.cli.doctor import configured_lanes
from tinkex.engine.store import Store

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServedEngine, Path]]:
    home = tmp_path_factory.mktemp("keys")
    with serve(home, "--model", f"tiny={tiny_model}") as engine:
        yield engine, home / "engine"


def logged_in(server: ServedEngine, home: Path, key: str | None = None) -> Done:
    return tinkex(
        "auth",
        "login",
        "--with-key",
        "-",
        "--base-url",
        server.url,
        stdin=f"{key or server.key}\n",
        home=home,
    )


def wait_until_rejected(server: ServedEngine, key: str) -> None:
    """Waits until a running server rejects a revoked key."""
    deadline = time.monotonic() + 60
    while tinkex("run", "list", "--base-url", server.url, "--api-key", key).code == 0:
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.slow
def test_a_login_checks_and_stores_the_key_for_every_program(
    server: tuple[ServedEngine, Path], tmp_path: Path
) -> None:
    engine, _ = server
    wrong = logged_in(engine, tmp_path, "tml-wrong")
    assert (wrong.code, wrong.out) == (1, "")
    assert "tml-wrong" not in wrong.err
    file = tmp_path / ".tinker" / "credentials.json"
    assert not file.exists()
    done = logged_in(engine, tmp_path)
    assert done.code == 0, done.err
    assert engine.key not in done.out
    stored = json.loads(file.read_text())
    assert stored["version"] == 1
    assert stored["keys"][stored["default"]]["key"] == engine.key
    assert stored["keys"][stored["default"]]["type"] == "manual"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    status = tinkex("auth", "status", "--base-url", engine.url, home=tmp_path, process=True)
    assert (status.code, status.out) == (0, "Credentials available: yes\nTinker accessible: yes\n")
    again = logged_in(engine, tmp_path)
    assert again.code == 1
    assert "tinkex auth logout" in again.err
    out = tinkex("auth", "logout", home=tmp_path)
    assert out.code == 0
    assert json.loads(file.read_text()) == {"version": 1, "default": None, "keys": {}}
    assert tinkex("auth", "logout", home=tmp_path).code == 1
    gone = tinkex("auth", "status", home=tmp_path)
    assert (gone.code, gone.out) == (1, "Credentials available: no\n")


@pytest.mark.slow
def test_credentials_are_interchangeable_with_the_official_program(
    server: tuple[ServedEngine, Path], tmp_path: Path
) -> None:
    from tinker.lib.credentials import JsonCredentialStore, ManualKey

    from tinkex.config.credentials import Credentials

    engine, _ = server
    assert logged_in(engine, tmp_path).code == 0
    file = tmp_path / ".tinker" / "credentials.json"
    theirs = JsonCredentialStore(file)
    record = theirs.get_default_key()
    assert record is not None
    assert record.key == engine.key
    theirs.add_key("99", ManualKey(key="tml-other", name="other", note="", details=record.details))
    theirs.set_default("99")
    ours = Credentials.load(file)
    assert ours.default_key is not None
    assert (ours.default, ours.default_key.key, len(ours.keys)) == ("99", "tml-other", 2)


@pytest.mark.slow
def test_logout_revokes_a_key_generated_for_this_machine(
    server: tuple[ServedEngine, Path], tmp_path: Path
) -> None:
    from tinkex.config.credentials import Credentials, StoredKey

    engine, data = server
    key = tinkex("keys", "create", "ada", "--data-dir", str(data), "-q").out.strip()
    stored = Credentials.load(tmp_path / ".tinker" / "credentials.json")
    stored.add("5", StoredKey(key, "laptop", "generated"))
    stored.save()
    assert "tml-" not in repr(stored)
    done = tinkex("auth", "logout", "--base-url", engine.url, home=tmp_path)
    assert "revoked on the server" in done.out
    wait_until_rejected(engine, key)


@pytest.mark.slow
def test_whoami_prints_the_user(server: tuple[ServedEngine, Path]) -> None:
    engine, _ = server
    printed = tinkex("auth", "whoami", "--json", server=engine)
    assert printed.json["user_urn"] == "tml:user:local"


@pytest.mark.slow
def test_keys_are_created_listed_and_revoked_while_the_server_runs(server: tuple[ServedEngine, Path]) -> None:
    engine, data = server
    directory = ("--data-dir", str(data))
    made = tinkex("keys", "create", "grace", "--name", "laptop", *directory, "--json", process=True).json
    assert (
        tinkex("run", "list", "--base-url", engine.url, "--api-key", made["key"], "--json").json["runs"] == []
    )
    listed = tinkex("keys", "list", "--user", "grace", *directory, "--json").json["keys"]
    assert [(row["user"], row["name"], row["revoked_at"]) for row in listed] == [("grace", "laptop", None)]
    assert made["key"] not in tinkex("keys", "list", *directory).out
    key_id = str(made["key_id"])
    assert "Nothing was revoked" in tinkex("keys", "revoke", key_id, *directory, stdin="n\n").out
    unanswered = tinkex("keys", "revoke", key_id, *directory)
    assert (unanswered.code, unanswered.out) == (1, "")
    assert "--yes" in unanswered.err
    assert tinkex("keys", "revoke", key_id, "-y", *directory).out == "Revoked 1 key.\n"
    wait_until_rejected(engine, made["key"])
    again = tinkex("keys", "revoke", key_id, "9999", "-y", "--json", *directory)
    assert again.code == 1
    assert json.loads(again.out) == {"revoked": [], "failed": [made["key_id"], 9999]}


def test_an_operator_key_is_created_only_by_its_option(server: tuple[ServedEngine, Path]) -> None:
    _, data = server
    directory = ("--data-dir", str(data))
    before = tinkex("keys", "list", *directory, "--json").json["keys"]
    silent = tinkex("keys", "create", "local", *directory)
    assert (silent.code, silent.out) == (2, "")
    assert "--operator" in silent.err
    other = tinkex("keys", "create", "grace", "--operator", *directory)
    assert (other.code, other.out) == (2, "")
    assert tinkex("keys", "list", *directory, "--json").json["keys"] == before
    made = tinkex("keys", "create", "local", "--operator", *directory, "--json").json
    assert made["user"] == "local"
    assert tinkex("keys", "revoke", str(made["key_id"]), "--yes", *directory).code == 0


def test_a_directory_without_a_server_is_rejected(tmp_path: Path) -> None:
    done = tinkex("keys", "list", "--data-dir", str(tmp_path))
    assert (done.code, done.out) == (1, "")
    assert "tinkex serve" in done.err


@pytest.mark.slow
def test_the_doctor_reports_findings_and_fixes(server: tuple[ServedEngine, Path], tmp_path: Path) -> None:
    engine, _ = server
    port = engine.url.rsplit(":", 1)[1]
    well = tinkex("doctor", "--port", port, "--json", server=engine, home=tmp_path).json
    found = {check["check"]: check for check in well["checks"]}
    assert well["ok"]
    assert found["server"]["state"] == found["key"]["state"] == found["extra engine"]["state"] == "ok"
    assert found[f"port {port}"]["state"] == "note"
    assert found["default model"]["fix"].endswith("tinkex model pull HuggingFaceTB/SmolLM2-135M-Instruct")
    rejected = tinkex(
        "doctor", "--base-url", engine.url, "--api-key", "tml-wrong", home=tmp_path, process=True
    )
    assert rejected.code == 1
    assert "✗ key" in rejected.out
    assert "tinkex auth login" in rejected.out
    assert "1 of" in rejected.err
    silent = tinkex("doctor", "--base-url", "http://127.0.0.1:9", "--api-key", "tml-x", home=tmp_path)
    assert silent.code == 1
    assert "✗ server" in silent.out
    keyless = tinkex("doctor", "--base-url", engine.url, home=tmp_path)
    assert keyless.code == 1
    assert "✗ key: none" in keyless.out


@pytest.mark.parametrize(
    ("settings", "state", "expected"),
    [
        ({}, "ok", "starts 1 worker for training and sampling, on this machine"),
        ({"TRAINERS": "2", "SAMPLERS": "3"}, "ok", "starts 2 trainers, 3 samplers, on this machine"),
        ({"MAX_SAMPLERS": "4"}, "ok", "starts 1 trainer, 1 to 4 samplers, on this machine"),
        ({"RAY": "10.0.0.1:6379"}, "ok", "on the Ray cluster 10.0.0.1:6379"),
        ({"SAMPLERS": "1", "MAX_SAMPLERS": "4"}, "problem", "choose a fixed number"),
    ],
)
def test_the_doctor_reports_the_workers_of_the_configuration(
    settings: dict[str, str], state: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in settings.items():
        monkeypatch.setenv(f"TINKEX_SERVE_{name}", value)
    found = {finding.check: finding for finding in configured_lanes()}
    assert found["workers"].state == state
    assert expected in found["workers"].detail
    if "RAY" in settings:  # which is not installed where these tests run
        assert found["Ray cluster"].state == "problem"
        assert found["Ray cluster"].fix == "pip install 'tinkex[ray]'"


@pytest.mark.slow
def test_the_doctor_reports_the_lanes_of_a_server(tiny_model: Path, tmp_path: Path) -> None:
    limits = ("--min-samplers", "1", "--max-samplers", "3", "--threads", "1")
    with serve(tmp_path, "--model", f"tiny={tiny_model}", *limits) as engine:
        well = tinkex("doctor", "--port", "0", "--json", server=engine, home=tmp_path).json
        found = {check["check"]: check for check in well["checks"]}
        assert found["lane trainer-0"]["detail"] == found["lane sampler-0"]["detail"] == "running, 0 restarts"
        assert found["samplers"]["detail"] == "1 running, 0 starting, 0 draining; 1 to 3 with the load"


def test_the_doctor_reports_an_unusable_data_directory(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    corrupt = tmp_path / "corrupt"
    corrupt.mkdir()
    (corrupt / "engine.db").write_bytes(b"no database" * 500)
    # Not even root can create a directory below a file or in /proc.
    for directory in (file / "engine", Path("/proc/tinkex/engine"), corrupt):
        done = tinkex("doctor", "--local", "--json", home=tmp_path, TINKEX_DATA_DIR=str(directory))
        assert done.code == 1, directory
        (found,) = (check for check in json.loads(done.out)["checks"] if check["check"] == "data directory")
        assert found["state"] == "problem"
        assert str(directory) in found["detail"]
        assert "TINKEX_DATA_DIR" in found["fix"]
    new = tmp_path / "new"
    well = tinkex("doctor", "--local", "--json", home=tmp_path, TINKEX_DATA_DIR=str(new / "engine")).json
    assert "will be created" in next(
        one["detail"] for one in well["checks"] if one["check"] == "data directory"
    )
    assert not new.exists(), "asking leaves nothing behind"


@pytest.mark.slow
def test_a_login_at_an_unreachable_server_fails_fast(tmp_path: Path) -> None:
    done = tinkex(
        "auth", "login", "--with-key", "tml-x", "--base-url", "http://127.0.0.1:9", home=tmp_path, process=True
    )  # fmt: skip
    assert (done.code, done.out) == (1, "")
    assert "http://127.0.0.1:9" in done.err


@pytest.mark.slow
def test_the_doctor_reports_the_process_that_holds_the_data_directory(
    server: tuple[ServedEngine, Path],
) -> None:
    engine, data = server
    done = tinkex("doctor", "--local", "--json", TINKEX_DATA_DIR=str(data)).json
    (found,) = (check for check in done["checks"] if check["check"] == "data directory")
    assert found["state"] == "note"
    assert f"process {engine.pid}" in found["detail"]


def test_the_doctor_compacts_a_database_that_cannot_shrink(tmp_path: Path) -> None:
    old_database(tmp_path / "engine.db")
    data = {"TINKEX_DATA_DIR": str(tmp_path)}

    def found(*options: str) -> dict[str, str]:
        done = tinkex("doctor", "--local", "--json", *options, home=tmp_path / "home", **data)
        checks = json.loads(done.out)["checks"]
        (check,) = (each for each in checks if each["check"] == "data directory")
        return dict(check)

    assert found()["state"] == "note"
    assert "tinkex doctor --compact" in found()["fix"]
    assert (found("--compact")["state"], found()["state"]) == ("ok", "ok")
    with Store(tmp_path) as store:
        assert store.database.can_shrink
        assert store.sessions.get("s") is not None
        used = found("--compact")
        assert (used["state"], "in use" in used["detail"]) == ("problem", True)
