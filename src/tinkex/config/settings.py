"""The client's settings: sources, defaults and validation.

An argument takes precedence over its environment variable, which takes precedence over the default; an empty
environment variable counts as unset. The API key has one more source, ``~/.tinker/credentials.json``.

>>> config = Config.resolve(api_key="tml-0123456789abcdef", environ={"TINKER_TAGS": "sweep, lr"})
>>> config.tags, config.timeout
(('sweep', 'lr'), 60.0)
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict
from urllib.parse import urlsplit

from tinkex.config import values as accept
from tinkex.config.values import DEFAULT_BASE_URL, LOCAL, PARITIES, POLL_BACKOFF, mask
from tinkex.errors import ConfigError, MissingApiKeyError

__all__ = ["DEFAULT_BASE_URL", "LOCAL", "SETTINGS", "ClientSetting", "Config", "ConfigOptions", "mask"]

Pairs: TypeAlias = Mapping[str, str | float] | Iterable[tuple[str, str | float]]


@dataclass(frozen=True)
class ClientSetting:
    """One entry of the settings table."""

    name: str
    env: str | None
    read: Callable[[Any], Any]
    """Validates and converts a value; raises ``ValueError``."""
    meaning: str
    env_fallback: str | None = None
    """A general variable that is read if ``env`` is not set."""

    @property
    def variables(self) -> list[str]:
        """The environment variables that set it, in order of precedence."""
        return [name for name in (self.env, self.env_fallback) if name]


@dataclass(frozen=True)
class Config:
    """The validated settings of a client; create one with :meth:`resolve`, which also reads the environment variables.

    - ``api_key``: the credential sent with every call (``TINKER_API_KEY``)
    - ``base_url``: the server, or 'local' for the engine in-process (``TINKER_BASE_URL``)
    - ``project_id``: the project new sessions belong to (``TINKER_PROJECT_ID``)
    - ``tags``: labels attached to new sessions (``TINKER_TAGS``)
    - ``user_metadata``: metadata stored with new sessions
    - ``timeout``: timeout of one request, in seconds (``TINKEX_TIMEOUT``)
    - ``max_retries``: retries of a failed request, and of a sample; unset: as many as fit into 300 s, samples
      as long as the client makes progress (``TINKEX_MAX_RETRIES``)
    - ``default_headers``: headers added to every request (``TINKEX_DEFAULT_HEADERS``)
    - ``default_query``: query parameters added to every request (``TINKEX_DEFAULT_QUERY``)
    - ``cloudflare_client_id``: Cloudflare Access id (``CLOUDFLARE_ACCESS_CLIENT_ID``)
    - ``cloudflare_client_secret``: Cloudflare Access secret (``CLOUDFLARE_ACCESS_CLIENT_SECRET``)
    - ``proxy``: the proxy of all requests, downloads and streams included: http, https, socks5 (names are
      resolved here) or socks5h (names are resolved by the proxy) (``TINKEX_PROXY``)
    - ``proxy_headers``: headers sent to an http or https proxy only; a proxy-authorization here replaces the
      proxy's user and password (``TINKEX_PROXY_HEADERS``)
    - ``ca_file``: certificates (PEM) of authorities trusted in addition to the system's (``TINKEX_CA_FILE``)
    - ``pool_size``: maximum number of connections per purpose (submitting, polling, heartbeats …), and of
      streams per purpose; unset: one per concurrent request (``TINKEX_POOL_SIZE``)
    - ``poll_backoff``: initial and maximum back-off, in seconds, between polls that the server answers
      immediately (``TINKEX_POLL_BACKOFF``)
    - ``circuit_breaker``: whether calls pause after consecutive failures, per server, key and endpoint
      (``TINKEX_CIRCUIT_BREAKER``)
    - ``circuit_breaker_failures``: consecutive failures that open a circuit breaker
      (``TINKEX_CIRCUIT_BREAKER_FAILURES``)
    - ``circuit_breaker_cooldown``: how long an open circuit breaker sends nothing before it probes, in seconds
      (``TINKEX_CIRCUIT_BREAKER_COOLDOWN``)
    - ``circuit_breaker_probes``: calls that a half-open circuit breaker lets through at a time
      (``TINKEX_CIRCUIT_BREAKER_PROBES``)
    - ``telemetry``: whether telemetry is sent to the server (``TINKER_TELEMETRY``)
    - ``telemetry_requests``: whether telemetry reports every request (name, status, duration), not only those
      that failed (``TINKEX_TELEMETRY_REQUESTS``)
    - ``log_rollouts``: whether the data of passes with logprobs and advantages is also stored on the server, as
      rollouts to look at (``TINKEX_LOG_ROLLOUTS``)
    - ``tracing``: whether OpenTelemetry spans are created, if the program has set up a tracer provider
      (``TINKEX_TRACING``)
    - ``log_level``: level of the logger 'tinkex': debug, info, warning or error (``TINKER_LOG``)
    - ``dump_headers``: whether every request is logged (at info) with its headers, secrets masked
      (``TINKEX_DUMP_HEADERS``)
    - ``deprecation_warnings``: whether deprecated methods, such as the ``_async`` ones, raise a
      DeprecationWarning at the line that calls them (``TINKEX_DEPRECATION_WARNINGS``)
    - ``parity``: defaults of timeout and max_retries: 'python' (60 s, as many as fit into 300 s) or 'beam' (120
      s, 2) (``TINKEX_PARITY``)
    - ``credential_cmd``: a shell command that prints the credential, where there is no api_key; its output is
      exchanged for short-lived tokens where the server issues them (``TINKER_CREDENTIAL_CMD``)

    >>> Config(base_url="http://127.0.0.1:8787", timeout=30).timeout
    30.0

    Its ``repr`` masks every secret:

    >>> Config.resolve(api_key="tml-0123456789abcdef", environ={}).api_key == "tml-0123456789abcdef"
    True
    >>> "0123456789" in repr(Config.resolve(api_key="tml-0123456789abcdef", environ={}))
    False
    """

    api_key: str | None = None
    base_url: str = DEFAULT_BASE_URL
    project_id: str | None = None
    tags: tuple[str, ...] = ()
    user_metadata: Mapping[str, Any] = field(default_factory=dict)
    timeout: float = None  # type: ignore[assignment]  # as parity says
    max_retries: int | None = None
    default_headers: Mapping[str, str] = field(default_factory=dict)
    default_query: Mapping[str, str] = field(default_factory=dict)
    cloudflare_client_id: str | None = None
    cloudflare_client_secret: str | None = None
    proxy: str | None = None
    proxy_headers: Mapping[str, str] = field(default_factory=dict)
    ca_file: Path | None = None
    pool_size: int | None = None
    poll_backoff: tuple[float, float] = POLL_BACKOFF
    credential_cmd: str | None = None
    circuit_breaker: bool = True
    circuit_breaker_failures: int = 5
    circuit_breaker_cooldown: float = 5.0
    circuit_breaker_probes: int = 1
    telemetry: bool = True
    telemetry_requests: bool = False
    log_rollouts: bool = False
    tracing: bool = True
    log_level: str | None = None
    dump_headers: bool = False
    deprecation_warnings: bool = False
    parity: str = "python"

    def __post_init__(self) -> None:
        for name, setting in SETTINGS.items():
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, _read(setting, value, f"Config({name}=…)"))
        for name, default in zip(("timeout", "max_retries"), PARITIES[self.parity], strict=True):
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        if self.proxy_headers and self.proxy is None:
            raise ConfigError("proxy_headers need a proxy, and none is set; pass proxy=… or set TINKEX_PROXY")
        if self.proxy_headers and urlsplit(self.proxy or "").scheme.startswith("socks"):
            raise ConfigError(
                "a SOCKS proxy takes no headers; remove proxy_headers (TINKEX_PROXY_HEADERS), and put user and "
                "password into the address: proxy=socks5://user:password@host:1080"
            )

    @classmethod
    def resolve(
        cls,
        *,
        environ: Mapping[str, str] | None = None,
        credentials: Path | None = None,
        needs_key: bool = True,
        **arguments: Any,
    ) -> Config:
        """Resolves every setting: the argument unless it is None, else the environment, else the default.

        ``arguments`` are settings by name. ``environ`` replaces the environment of this process, and ``credentials`` the file
        with stored keys. ``needs_key=False`` is for clients with a custom transport, which may not need a key.

        >>> Config.resolve(base_url="local", timeout=30, environ={}).timeout
        30.0
        >>> Config.resolve(environ={"TINKER_BASE_URL": "http://host:8787", "TINKER_API_KEY": "tml-key"}).base_url
        'http://host:8787'
        """
        environ = os.environ if environ is None else environ
        unknown = sorted(set(arguments) - set(SETTINGS))
        if unknown:
            raise TypeError(f"unknown setting {unknown[0]!r}; available: {', '.join(SETTINGS)}")
        values: dict[str, Any] = {}
        for name, setting in SETTINGS.items():
            given = arguments.get(name)
            if given is not None and given != "":
                values[name] = _read(setting, given, f"argument {name}")
                continue
            for variable in setting.variables:
                if environ.get(variable, "").strip():
                    source = f"environment variable {variable}"
                    values[name] = _read(setting, environ[variable].strip(), source)
                    break
        base_url = values.get("base_url", DEFAULT_BASE_URL)
        if "api_key" not in values and "credential_cmd" not in values and base_url != LOCAL:
            key = _stored_key(credentials, environ)
            if key is not None:
                values["api_key"] = key
            elif needs_key:
                raise MissingApiKeyError(
                    f"no API key for {base_url}: pass api_key=…, set TINKER_API_KEY, or use "
                    f"base_url={LOCAL!r} for the embedded engine, which needs none"
                )
        return cls(**values)

    @property
    def is_local(self) -> bool:
        """Whether calls go to the embedded engine."""
        return self.base_url == LOCAL

    @property
    def is_hosted(self) -> bool:
        """Whether calls go to the hosted service rather than to a self-hosted server."""
        return urlsplit(self.base_url).hostname == urlsplit(DEFAULT_BASE_URL).hostname

    def __repr__(self) -> str:
        shown = ", ".join(f"{f.name}={accept.masked(f.name, getattr(self, f.name))!r}" for f in fields(self))
        return f"Config({shown})"


class ConfigOptions(TypedDict, total=False):
    """The settings that a client takes as keyword arguments, besides those with a parameter of their own."""

    tags: Sequence[str] | str
    timeout: float
    max_retries: int
    default_headers: Pairs
    default_query: Pairs
    cloudflare_client_id: str
    cloudflare_client_secret: str
    proxy: str
    proxy_headers: Pairs
    ca_file: str | os.PathLike[str]
    pool_size: int
    poll_backoff: tuple[float, float] | str
    credential_cmd: str
    circuit_breaker: bool
    circuit_breaker_failures: int
    circuit_breaker_cooldown: float
    circuit_breaker_probes: int
    telemetry: bool
    telemetry_requests: bool
    log_rollouts: bool
    tracing: bool
    log_level: str
    dump_headers: bool
    deprecation_warnings: bool
    parity: str


def _read(setting: ClientSetting, value: Any, source: str) -> Any:
    try:
        return setting.read(value)
    except ValueError as error:
        raise ConfigError(f"{source}: {error}") from error


SETTINGS: Mapping[str, ClientSetting] = {
    setting.name: setting
    for setting in (
        ClientSetting("api_key", "TINKER_API_KEY", accept.api_key, "the credential sent with every call"),
        ClientSetting("base_url", "TINKER_BASE_URL", accept.base_url, f"the server, or {LOCAL!r} for the engine in-process"),
        ClientSetting("project_id", "TINKER_PROJECT_ID", accept.text, "the project new sessions belong to"),
        ClientSetting("tags", "TINKER_TAGS", accept.tags, "labels attached to new sessions"),
        ClientSetting("user_metadata", None, accept.user_metadata, "metadata stored with new sessions"),
        ClientSetting("timeout", "TINKEX_TIMEOUT", accept.timeout, "timeout of one request, in seconds"),
        ClientSetting(
            "max_retries",
            "TINKEX_MAX_RETRIES",
            accept.max_retries,
            "retries of a failed request, and of a sample; unset: as many as fit into 300 s, samples as long as the client makes progress",
        ),
        ClientSetting("default_headers", "TINKEX_DEFAULT_HEADERS", accept.headers, "headers added to every request"),
        ClientSetting("default_query", "TINKEX_DEFAULT_QUERY", accept.pairs, "query parameters added to every request"),
        ClientSetting("cloudflare_client_id", "CLOUDFLARE_ACCESS_CLIENT_ID", accept.header_value, "Cloudflare Access id"),
        ClientSetting(
            "cloudflare_client_secret", "CLOUDFLARE_ACCESS_CLIENT_SECRET", accept.header_value, "Cloudflare Access secret"
        ),
        ClientSetting("proxy", "TINKEX_PROXY", accept.proxy, "the proxy of all requests, downloads and streams included: http, https, socks5 (names are resolved here) or socks5h (names are resolved by the proxy)"),
        ClientSetting("proxy_headers", "TINKEX_PROXY_HEADERS", accept.headers, "headers sent to an http or https proxy only; a proxy-authorization here replaces the proxy's user and password"),
        ClientSetting("ca_file", "TINKEX_CA_FILE", accept.certificates, "certificates (PEM) of authorities trusted in addition to the system's", "SSL_CERT_FILE"),
        ClientSetting("pool_size", "TINKEX_POOL_SIZE", accept.pool_size, "maximum number of connections per purpose (submitting, polling, heartbeats …), and of streams per purpose; unset: one per concurrent request"),
        ClientSetting("poll_backoff", "TINKEX_POLL_BACKOFF", accept.poll_backoff, "initial and maximum back-off, in seconds, between polls that the server answers immediately"),
        ClientSetting("circuit_breaker", "TINKEX_CIRCUIT_BREAKER", accept.flag, "whether calls pause after consecutive failures, per server, key and endpoint"),
        ClientSetting("circuit_breaker_failures", "TINKEX_CIRCUIT_BREAKER_FAILURES", accept.count, "consecutive failures that open a circuit breaker"),
        ClientSetting("circuit_breaker_cooldown", "TINKEX_CIRCUIT_BREAKER_COOLDOWN", accept.timeout, "how long an open circuit breaker sends nothing before it probes, in seconds"),
        ClientSetting("circuit_breaker_probes", "TINKEX_CIRCUIT_BREAKER_PROBES", accept.count, "calls that a half-open circuit breaker lets through at a time"),
        ClientSetting("telemetry", "TINKER_TELEMETRY", accept.flag, "whether telemetry is sent to the server"),
        ClientSetting("telemetry_requests", "TINKEX_TELEMETRY_REQUESTS", accept.flag, "whether telemetry reports every request (name, status, duration), not only those that failed"),
        ClientSetting("log_rollouts", "TINKEX_LOG_ROLLOUTS", accept.flag, "whether the data of passes with logprobs and advantages is also stored on the server, as rollouts to look at"),
        ClientSetting("tracing", "TINKEX_TRACING", accept.flag, "whether OpenTelemetry spans are created, if the program has set up a tracer provider"),
        ClientSetting("log_level", "TINKER_LOG", accept.log_level, "level of the logger 'tinkex': debug, info, warning or error"),
        ClientSetting("dump_headers", "TINKEX_DUMP_HEADERS", accept.flag, "whether every request is logged (at info) with its headers, secrets masked"),
        ClientSetting("deprecation_warnings", "TINKEX_DEPRECATION_WARNINGS", accept.flag, "whether deprecated methods, such as the `_async` ones, raise a DeprecationWarning at the line that calls them"),
        ClientSetting("parity", "TINKEX_PARITY", accept.parity, "defaults of timeout and max_retries: 'python' (60 s, as many as fit into 300 s) or 'beam' (120 s, 2)"),
        ClientSetting("credential_cmd", "TINKER_CREDENTIAL_CMD", accept.text, "a shell command that prints the credential, where there is no api_key; its output is exchanged for short-lived tokens where the server issues them"),
    )
}  # fmt: skip


# ---- the credentials file ----


def _stored_key(path: Path | None, environ: Mapping[str, str]) -> str | None:
    """Returns the default key of the credentials file, if there is one."""
    home = environ.get("HOME")
    file = path or (Path(home) if home else Path.home()) / ".tinker" / "credentials.json"
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read ({error}); log in again or set TINKER_API_KEY") from error
    try:
        default = stored["default"]
        if default is None:
            return None
        return accept.api_key(stored["keys"][default]["key"])
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{file} is not a credentials file: {error!r} is missing; log in again") from error
    except ValueError as error:
        raise ConfigError(f"the default key in {file}: {error}") from error


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Loads a name of 0.1, with a ``DeprecationWarning``."""
        if name.startswith("__"):  # the import system looks up __path__
            raise AttributeError(name)
        from tinkex._moved import load_renamed

        return load_renamed(__name__, name)
