"""Settings of the server: sources, precedence and validation."""

from __future__ import annotations

import dataclasses
import io
import json
import logging
from pathlib import Path

import pytest

from tinkex.cli.server import check_exposure, engine_config
from tinkex.cli.server_logs import set_up_logs
from tinkex.cli.server_settings import SETTINGS, read_settings
from tinkex.engine.config import EngineConfig
from tinkex.errors import SetupError

NOT_FOR_OPERATORS = {"home", "models", "auth", "any_directory", "ray_address"}
"""Set by $TINKEX_HOME, --model, --no-auth and --ray; ``any_directory`` only applies to the embedded engine."""


def test_every_field_of_the_engine_can_be_set_and_has_the_same_default() -> None:
    fields = {field.name: field for field in dataclasses.fields(EngineConfig)}
    assert {name for name, setting in SETTINGS.items() if setting.engine} == fields.keys() - NOT_FOR_OPERATORS
    for name, setting in SETTINGS.items():
        if setting.engine and setting.default is not None and name != "worker":
            assert fields[name].default == setting.default, name
    # A server computes in a worker process; a program that embeds the engine stays one process.
    assert (fields["worker"].default, SETTINGS["worker"].default) == ("thread", "process")


ORIGINS = ("https://a.example", "http://localhost:3000")
VALUES = {
    "integer": 7,
    "bytes": "3M",
    "seconds": "11s",
    "boolean": True,
    "path": "somewhere",
    "list": ",".join(ORIGINS),
}
PARSED = {
    "integer": 7,
    "bytes": 3 * 2**20,
    "seconds": 11.0,
    "boolean": True,
    "path": Path("somewhere"),
    "list": ORIGINS,
}


COMPANIONS = {"min_samplers": "max_samplers", "sampler_idle_s": "max_samplers"}
"""Settings that need another one."""


@pytest.mark.parametrize("name", [n for n, s in SETTINGS.items() if s.engine and s.kind != "text"])
@pytest.mark.parametrize("source", ["flag", "environment", "file"])
def test_a_setting_reaches_the_engine_from_every_source(name: str, source: str, tmp_path: Path) -> None:
    kind = SETTINGS[name].kind
    file = tmp_path / "server.toml"
    file.write_text(f"{name} = {json.dumps(VALUES[kind])}\n" if source == "file" else "")
    variable = SETTINGS[name].variable or f"TINKEX_SERVE_{name.upper()}"
    companion = {COMPANIONS[name]: 7} if name in COMPANIONS else {}
    settings = read_settings(
        companion | ({name: VALUES[kind]} if source == "flag" else {}),
        {variable: str(VALUES[kind])} if source == "environment" else {},
        file,
    )
    assert getattr(engine_config(settings), name) == PARSED[kind]


def test_options_override_the_environment_and_the_environment_overrides_the_file(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text('port = 1\nhost = "::1"\nmax_live_runs = 3\n[models]\ntiny = "/models/tiny"\n')
    environ = {"TINKEX_SERVE_PORT": "2", "TINKEX_SERVE_HOST": "localhost", "TINKEX_SERVE_CONFIG": str(file)}
    settings = read_settings({"port": "3", "host": None, "models": ()}, environ)
    assert (settings["port"], settings["host"], settings["max_live_runs"]) == (3, "localhost", 3)
    assert settings["models"] == ("tiny=/models/tiny",)
    assert dict(engine_config(settings).models) == {"tiny": "/models/tiny"}
    assert read_settings({}, {"TINKEX_MODELS": "a=/a, /b"})["models"] == ("a=/a", "/b")
    # An option can disable a boolean that the file enables.
    file.write_text("deterministic = true\n")
    assert read_settings({}, {}, file)["deterministic"]
    assert not read_settings({"deterministic": False}, {}, file)["deterministic"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("max_live_rums = 3", "max_live_rums"),
        ("port = true", "port"),
        ('kv_cache_bytes = "much"', "kv_cache_bytes"),
        ('log_format = "xml"', "log_format"),
        ("maintenance_interval_s = inf", "maintenance_interval_s"),
        ("shutdown_after_s = nan", "shutdown_after_s"),
        ('shutdown_after_s = "99999999d"', "shutdown_after_s"),
        ("models = [1]", "models"),
        ("port 3", "not valid TOML"),
    ],
)
def test_an_invalid_file_is_rejected_with_an_error_that_names_the_setting(
    text: str, expected: str, tmp_path: Path
) -> None:
    file = tmp_path / "server.toml"
    file.write_text(text)
    with pytest.raises(SetupError, match=expected) as error:
        read_settings({}, {}, file)
    assert "server.toml" in str(error.value)


def test_errors_name_the_misspelt_or_missing_setting() -> None:
    with pytest.raises(SetupError, match="TINKEX_SERVE_PROT"):
        read_settings({}, {"TINKEX_SERVE_PROT": "1"})
    with pytest.raises(SetupError, match=r"nowhere\.toml"):
        read_settings({}, {"TINKEX_SERVE_CONFIG": "nowhere.toml"})
    with pytest.raises(SetupError, match="--session-idle-s"):
        read_settings({"session_idle_s": "soon"}, {})
    with pytest.raises(SetupError, match="threads"):
        engine_config(read_settings({"threads": 0}, {}))


def test_access_from_other_machines_needs_tls_or_an_explicit_setting() -> None:
    def check(**flags: object) -> None:
        settings = read_settings(flags, {})
        check_exposure(engine_config(settings), settings)

    check()
    check(host="localhost")
    check(host="0.0.0.0", insecure=True)
    check(host="0.0.0.0", behind_proxy="10.0.0.5")
    for host in ("0.0.0.0", "192.0.2.1", "::"):
        with pytest.raises(SetupError, match="--tls-cert"):
            check(host=host)
    with pytest.raises(SetupError, match="tls_key is not"):
        check(tls_cert="chain.pem")
    with pytest.raises(SetupError, match=r"chain\.pem"):
        check(tls_cert="chain.pem", tls_key="key.pem")


@pytest.mark.parametrize("access", [True, False])
def test_requests_are_logged_only_with_access_log_and_a_value_cannot_forge_a_line(
    access: bool,
) -> None:
    logs = io.StringIO()
    set_up_logs("text", "warning", access=access, stream=logs)
    logging.getLogger("tinkex.access").info("call", extra={"fields": {"user": "a\nERROR forged: line"}})
    logging.getLogger("tinkex.engine").info("below the level")
    assert logs.getvalue().count("\n") == int(access)


def test_a_traceback_is_part_of_its_json_line() -> None:
    logs = io.StringIO()
    set_up_logs("json", "info", access=False, stream=logs)
    try:
        raise ValueError("of a test")
    except ValueError as error:
        logging.getLogger("tinkex.engine").exception("it failed", exc_info=error)
    (line,) = logs.getvalue().splitlines()
    assert json.loads(line)["level"] == "error"
    assert "ValueError: of a test" in json.loads(line)["trace"]


@pytest.mark.parametrize("name", ["trainer_resources", "sampler_resources"])
def test_resources_without_a_cluster_are_rejected(name: str) -> None:
    with pytest.raises(SetupError, match=f"{name} is 'CPU=2'.*add --ray"):
        engine_config(read_settings({name: "CPU=2"}, {}))
    assert getattr(engine_config(read_settings({name: "CPU=2", "ray": "local"}, {})), name) == "CPU=2"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"min_samplers": 2}, "set max_samplers too"),
        ({"sampler_idle_s": 5}, "set max_samplers too"),
        ({"samplers": 2, "max_samplers": 4}, "choose a fixed number"),
        ({"min_samplers": 3, "max_samplers": 2}, "min_samplers from 0 to that"),
        ({"max_samplers": 0}, "max_samplers from 1 to 256"),
        ({"min_samplers": -1, "max_samplers": 2}, "min_samplers from 0 to that"),
    ],
)
def test_limits_of_a_number_of_samplers_that_contradict_each_other_are_rejected(
    flags: dict[str, int], message: str
) -> None:
    with pytest.raises(SetupError, match=message):
        engine_config(read_settings(flags, {}))
