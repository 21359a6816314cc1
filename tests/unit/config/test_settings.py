"""Settings: where they come from, what they accept, and that secrets stay secret."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tinkex import AdminClient, RestClient, ServiceClient
from tinkex.config import DEFAULT_BASE_URL, SETTINGS, Config, ConfigOptions, mask
from tinkex.errors import ConfigError, TinkexError

KEY = "tml-0123456789abcdef"


def resolve(environ: dict[str, str] | None = None, **arguments: Any) -> Config:
    return Config.resolve(environ={"HOME": "/nowhere", **(environ or {})}, **arguments)


def test_an_argument_wins_over_the_environment_and_that_over_the_default() -> None:
    environ = {"TINKER_API_KEY": KEY, "TINKER_BASE_URL": "http://env:1"}
    assert resolve(environ, base_url="http://argument:2").base_url == "http://argument:2"
    assert resolve(environ).base_url == "http://env:1"
    assert resolve({"TINKER_API_KEY": KEY}).base_url == DEFAULT_BASE_URL


@pytest.mark.parametrize("empty", ["", "   "])
def test_an_empty_environment_variable_is_unset(empty: str) -> None:
    config = resolve({"TINKER_API_KEY": KEY, "TINKER_BASE_URL": empty, "TINKER_PROJECT_ID": empty})
    assert config.base_url == DEFAULT_BASE_URL
    assert config.project_id is None


def test_every_setting_is_read_from_its_environment_variable() -> None:
    config = resolve(
        {
            "TINKER_API_KEY": "eyJhbGciOi",
            "TINKER_BASE_URL": "https://host/prefix/",
            "TINKER_PROJECT_ID": "p1",
            "TINKER_TAGS": "a, b,,a",
            "TINKEX_TIMEOUT": "2.5",
            "TINKEX_MAX_RETRIES": "3",
            "TINKEX_DEFAULT_HEADERS": '{"x-team": "alpha", "x-n": 3}',
            "TINKEX_DEFAULT_QUERY": '{"trace": "1"}',
            "CLOUDFLARE_ACCESS_CLIENT_ID": "cf-id",
            "CLOUDFLARE_ACCESS_CLIENT_SECRET": "cf-secret",
            "TINKEX_PROXY": "http://user:hidden@proxy:3128",
            "TINKEX_PROXY_HEADERS": '[["x-route", "a"]]',
            "TINKEX_POOL_SIZE": "12",
            "TINKEX_POLL_BACKOFF": "0.5, 20",
            "TINKER_TELEMETRY": "off",
            "TINKER_LOG": "WARN",
            "TINKEX_DUMP_HEADERS": "yes",
            "TINKEX_PARITY": "Elixir",
        }
    )
    assert config == Config(
        api_key="eyJhbGciOi",
        base_url="https://host/prefix",
        project_id="p1",
        tags=("a", "b"),
        timeout=2.5,
        max_retries=3,
        default_headers={"x-team": "alpha", "x-n": "3"},
        default_query={"trace": "1"},
        cloudflare_client_id="cf-id",
        cloudflare_client_secret="cf-secret",
        proxy="http://user:hidden@proxy:3128",
        proxy_headers={"x-route": "a"},
        pool_size=12,
        poll_backoff=(0.5, 20.0),
        telemetry=False,
        log_level="warning",
        dump_headers=True,
        parity="beam",
    )
    assert {s.env for s in SETTINGS.values()} >= {"TINKER_API_KEY", "TINKEX_PROXY"}


@pytest.mark.parametrize(
    ("environ", "arguments"),
    [
        ({}, {"default_headers": [("x-a", "1")], "default_query": (("q", 2),)}),
        ({}, {"default_headers": {" x-a ": "1"}, "default_query": {"q ": 2}}),
        ({"TINKEX_DEFAULT_HEADERS": '[["x-a", "1"]]', "TINKEX_DEFAULT_QUERY": '{"q": 2}'}, {}),
    ],
)
def test_headers_and_parameters_are_a_mapping_or_pairs(
    environ: dict[str, str], arguments: dict[str, Any]
) -> None:
    config = Config.resolve(api_key=KEY, environ=environ, **arguments)
    assert (config.default_headers, config.default_query) == ({"x-a": "1"}, {"q": "2"})


@pytest.mark.parametrize("word", ["1", "TRUE", "yes", "on", "exponential", True])
def test_polling_with_back_off_is_the_default_and_can_be_named(word: Any) -> None:
    default = Config.resolve(api_key=KEY, environ={}).poll_backoff
    environ = {"TINKEX_POLL_BACKOFF": str(word)}
    assert Config.resolve(api_key=KEY, environ=environ).poll_backoff == default
    assert Config.resolve(api_key=KEY, environ={}, poll_backoff=word).poll_backoff == default


@pytest.mark.parametrize(
    ("environ", "arguments", "source"),
    [
        ({"TINKER_API_KEY": "secret"}, {}, "environment variable TINKER_API_KEY"),
        ({}, {"api_key": "secret"}, "argument api_key"),
        ({"TINKER_BASE_URL": "host:8787"}, {"api_key": KEY}, "environment variable TINKER_BASE_URL"),
        ({}, {"api_key": KEY, "base_url": "ftp://host"}, "argument base_url"),
        ({}, {"api_key": KEY, "base_url": "http://host:99999"}, "argument base_url"),
        ({}, {"api_key": KEY, "base_url": "http://user:pw@host"}, "argument base_url"),
        ({"TINKEX_TIMEOUT": "soon"}, {"api_key": KEY}, "environment variable TINKEX_TIMEOUT"),
        ({}, {"api_key": KEY, "timeout": 0}, "argument timeout"),
        ({}, {"api_key": KEY, "timeout": float("inf")}, "argument timeout"),
        ({"TINKEX_MAX_RETRIES": "-1"}, {"api_key": KEY}, "environment variable TINKEX_MAX_RETRIES"),
        ({"TINKEX_DEFAULT_HEADERS": "x-a: b"}, {"api_key": KEY}, "TINKEX_DEFAULT_HEADERS"),
        ({}, {"api_key": KEY, "default_headers": {"bad name": "x"}}, "argument default_headers"),
        ({}, {"api_key": KEY, "default_headers": {"x-a": "two\nlines"}}, "argument default_headers"),
        ({}, {"api_key": KEY, "default_query": {"": "x"}}, "argument default_query"),
        ({}, {"api_key": KEY, "default_query": [("x",)]}, "pair of name and value"),
        ({}, {"api_key": KEY, "default_headers": {"x-a": None}}, "argument default_headers"),
        ({"TINKEX_PROXY": "proxy"}, {"api_key": KEY}, "environment variable TINKEX_PROXY"),
        ({}, {"api_key": KEY, "proxy": "http://host:0"}, "argument proxy"),
        ({}, {"api_key": KEY, "user_metadata": ["a"]}, "argument user_metadata"),
        ({"TINKEX_PROXY_HEADERS": "[1]"}, {"api_key": KEY}, "TINKEX_PROXY_HEADERS"),
        ({"TINKEX_PROXY_HEADERS": "{"}, {"api_key": KEY}, "TINKEX_PROXY_HEADERS"),
        ({}, {"api_key": KEY, "proxy_headers": {"x-a": "b"}}, "none is set"),
        ({"TINKEX_POOL_SIZE": "0"}, {"api_key": KEY}, "TINKEX_POOL_SIZE"),
        ({"TINKEX_POLL_BACKOFF": "none"}, {"api_key": KEY}, "without back-off is not supported"),
        ({}, {"api_key": KEY, "poll_backoff": (2, 1)}, "argument poll_backoff"),
        ({"TINKER_TELEMETRY": "maybe"}, {"api_key": KEY}, "TINKER_TELEMETRY"),
        ({"TINKER_LOG": "loud"}, {"api_key": KEY}, "TINKER_LOG"),
        ({"TINKEX_PARITY": "ruby"}, {"api_key": KEY}, "TINKEX_PARITY"),
        ({}, {"api_key": KEY, "tags": [1]}, "argument tags"),
    ],
)
def test_a_bad_value_is_rejected_with_the_place_it_came_from(
    environ: dict[str, str], arguments: dict[str, Any], source: str
) -> None:
    with pytest.raises(ConfigError, match=source) as caught:
        resolve(environ, **arguments)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, TinkexError)


@pytest.mark.parametrize(
    ("environ", "arguments", "expected"),
    [
        ({}, {}, (60.0, None)),
        ({"TINKEX_PARITY": "python"}, {}, (60.0, None)),
        ({"TINKEX_PARITY": "BEAM"}, {}, (120.0, 2)),
        ({"TINKEX_PARITY": "beam"}, {"parity": "python"}, (60.0, None)),
        ({}, {"parity": "elixir", "timeout": 7}, (7.0, 2)),
        ({"TINKEX_MAX_RETRIES": "5", "TINKEX_PARITY": "beam"}, {}, (120.0, 5)),
    ],
)
def test_a_parity_mode_changes_defaults_and_nothing_that_is_given(
    environ: dict[str, str], arguments: dict[str, Any], expected: tuple[float, int | None]
) -> None:
    config = resolve({"TINKER_API_KEY": KEY, **environ}, **arguments)
    assert (config.timeout, config.max_retries) == expected
    if not environ:
        by_hand = Config(api_key=KEY, **arguments)
        assert (by_hand.timeout, by_hand.max_retries) == expected


def test_a_config_built_by_hand_is_checked_too() -> None:
    with pytest.raises(ConfigError, match="timeout"):
        Config(timeout=-1)


def test_an_unknown_setting_is_named() -> None:
    with pytest.raises(TypeError, match="retries"):
        resolve(api_key=KEY, retries=3)


def test_a_client_takes_every_setting_as_an_argument() -> None:
    own_parameters = {"api_key", "base_url", "project_id", "user_metadata"}
    assert {*ConfigOptions.__annotations__} == {*SETTINGS} - own_parameters
    for client in (ServiceClient, RestClient, AdminClient):
        config = client(base_url="http://h", api_key=KEY, timeout=7, tags=["a"], parity="beam").config
        assert (config.timeout, config.max_retries, config.tags) == (7.0, 2, ("a",))
        with pytest.raises(TypeError, match="unknown setting 'time_out'; available: "):
            client(api_key=KEY, time_out=7)
        with pytest.raises(TypeError, match="config contains all settings; 'timeout' was given as well"):
            client(config=config, timeout=7)
    with pytest.raises(TypeError, match="give one of them"):
        ServiceClient(api_key=KEY, default_headers={"a": "b"}, default_headers_overrides={"a": "c"})


def test_a_missing_key_says_how_to_give_one() -> None:
    with pytest.raises(ConfigError, match=r"TINKER_API_KEY.*'local'"):
        resolve()


def test_the_local_engine_needs_no_key() -> None:
    config = resolve({"TINKER_BASE_URL": "local"})
    assert config.is_local
    assert config.api_key is None
    assert not config.is_hosted


def test_a_credential_command_stands_in_for_a_key() -> None:
    assert resolve({"TINKER_CREDENTIAL_CMD": "echo tml-x"}).api_key is None
    assert resolve({"TINKER_CREDENTIAL_CMD": "echo tml-x"}).credential_cmd == "echo tml-x"
    assert resolve({"TINKER_CREDENTIAL_CMD": "echo tml-x"}, api_key=KEY).api_key == KEY
    assert "tml-x" not in repr(resolve({"TINKER_CREDENTIAL_CMD": "echo tml-x"}))


@pytest.fixture
def credentials(tmp_path: Path) -> Path:
    path = tmp_path / "credentials.json"
    path.write_text(json.dumps({"version": 1, "default": "k1", "keys": {"k1": {"key": KEY}}}))
    return path


def test_the_stored_default_key_is_the_last_resort(credentials: Path) -> None:
    assert resolve(credentials=credentials).api_key == KEY
    assert resolve({"TINKER_API_KEY": "tml-other"}, credentials=credentials).api_key == "tml-other"


def test_a_login_without_default_leaves_the_key_missing(credentials: Path) -> None:
    credentials.write_text(json.dumps({"version": 1, "default": None, "keys": {}}))
    with pytest.raises(ConfigError, match="no API key"):
        resolve(credentials=credentials)


@pytest.mark.parametrize("content", ["{", "[]", '{"default": "k9", "keys": {}}'])
def test_a_broken_credentials_file_is_named(credentials: Path, content: str) -> None:
    credentials.write_text(content)
    with pytest.raises(ConfigError, match=r"credentials\.json"):
        resolve(credentials=credentials)


def test_no_secret_is_in_the_text_form_or_in_errors() -> None:
    config = resolve(
        api_key=KEY,
        proxy="http://user:hidden@proxy:3128",
        cloudflare_client_secret="hush",
        default_headers={"Authorization": "Bearer quiet", "x-team": "alpha"},
    )
    text = repr(config)
    for secret in ("0123456789", "hidden", "hush", "quiet"):
        assert secret not in text
    assert "proxy:3128" in text
    assert "x-team" in text
    assert "alpha" not in text  # what headers say may be secret, whatever they are called
    with pytest.raises(ConfigError) as caught:
        resolve(api_key=KEY, proxy="gopher://user:hidden@proxy")
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize(
    ("secret", "shown"), [("tml-0123456789abcdef", "tml-…cdef"), ("tml-ab", "tml-…"), ("x", "…")]
)
def test_a_masked_secret_keeps_its_kind(secret: str, shown: str) -> None:
    assert mask(secret) == shown


def test_only_the_default_host_is_the_hosted_service() -> None:
    assert resolve(api_key=KEY).is_hosted
    assert not resolve(api_key=KEY, base_url="http://127.0.0.1:8787").is_hosted
