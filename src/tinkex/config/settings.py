"""Every setting of the client: where it is read from, its default, and what it accepts.

A setting given as an argument wins over its environment variable, which wins over the default; an empty
environment variable counts as unset. The API key has one more source, ``~/.tinker/credentials.json``.

>>> config = Config.resolve(api_key="tml-0123456789abcdef", environ={"TINKER_TAGS": "sweep, lr"})
>>> config.tags, config.timeout
(('sweep', 'lr'), 60.0)
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tinkex.config import values as accept
from tinkex.config.values import DEFAULT_BASE_URL, LOCAL, PARITIES, POLL_BACKOFF, mask
from tinkex.errors import ConfigError

__all__ = ["DEFAULT_BASE_URL", "LOCAL", "SETTINGS", "Config", "Setting", "mask"]


@dataclass(frozen=True)
class Setting:
    """One row of the table of settings."""

    name: str
    env: str | None
    read: Callable[[Any], Any]
    """Checks a value and brings it into its final form; raises ValueError that says what is wrong."""
    meaning: str
    env_too: str | None = None
    """A variable of wider use that is read when ``env`` is not set."""

    @property
    def variables(self) -> list[str]:
        """The environment variables that hold it, the first one first."""
        return [name for name in (self.env, self.env_too) if name]


@dataclass(frozen=True)
class Config:
    """The settings of a client, checked; build one with :meth:`resolve`.

    Its text form masks every secret:

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
    timeout: float = 60.0
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
    telemetry: bool = True
    tracing: bool = True
    log_level: str | None = None
    dump_headers: bool = False
    parity: str = "python"

    def __post_init__(self) -> None:
        for name, setting in SETTINGS.items():
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, _read(setting, value, f"Config({name}=…)"))
        if self.proxy_headers and self.proxy is None:
            raise ConfigError(
                "proxy_headers are for a proxy, and there is none; give proxy=… or TINKEX_PROXY"
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
        """Finds every setting: the argument unless it is None, else the environment, else the default.

        ``needs_key=False`` is for clients with a transport of their own, which may not need a key at all.
        """
        environ = os.environ if environ is None else environ
        unknown = sorted(set(arguments) - set(SETTINGS))
        if unknown:
            raise TypeError(f"no setting is called {unknown[0]!r}; there are {', '.join(SETTINGS)}")
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
        timeout, max_retries = PARITIES[values.get("parity", "python")]
        values = {"timeout": timeout, "max_retries": max_retries} | values
        base_url = values.get("base_url", DEFAULT_BASE_URL)
        if "api_key" not in values and "credential_cmd" not in values and base_url != LOCAL:
            key = _stored_key(credentials, environ)
            if key is not None:
                values["api_key"] = key
            elif needs_key:
                raise ConfigError(
                    f"no API key for {base_url}: pass api_key=…, set TINKER_API_KEY, or use "
                    f"base_url={LOCAL!r} for the engine in this process, which needs none"
                )
        return cls(**values)

    @property
    def is_local(self) -> bool:
        """Whether calls go to the engine inside this process."""
        return self.base_url == LOCAL

    @property
    def is_hosted(self) -> bool:
        """Whether calls go to the hosted service rather than to a server somebody runs for themselves."""
        return urlsplit(self.base_url).hostname == urlsplit(DEFAULT_BASE_URL).hostname

    def __repr__(self) -> str:
        shown = ", ".join(f"{f.name}={accept.masked(f.name, getattr(self, f.name))!r}" for f in fields(self))
        return f"Config({shown})"


def _read(setting: Setting, value: Any, source: str) -> Any:
    try:
        return setting.read(value)
    except ValueError as error:
        raise ConfigError(f"{source}: {error}") from error


SETTINGS: Mapping[str, Setting] = {
    row.name: row
    for row in (
        Setting("api_key", "TINKER_API_KEY", accept.api_key, "the credential sent with every call"),
        Setting("base_url", "TINKER_BASE_URL", accept.base_url, f"the server, or {LOCAL!r} for the engine in-process"),
        Setting("project_id", "TINKER_PROJECT_ID", accept.text, "the project new sessions belong to"),
        Setting("tags", "TINKER_TAGS", accept.tags, "words attached to new sessions, to find them again"),
        Setting("user_metadata", None, accept.user_metadata, "anything worth keeping with new sessions"),
        Setting("timeout", "TINKEX_TIMEOUT", accept.timeout, "seconds one request may take"),
        Setting(
            "max_retries",
            "TINKEX_MAX_RETRIES",
            accept.max_retries,
            "further tries of a failed request; unset: as many as fit into 300 s",
        ),
        Setting("default_headers", "TINKEX_DEFAULT_HEADERS", accept.headers, "headers added to every request"),
        Setting("default_query", "TINKEX_DEFAULT_QUERY", accept.pairs, "query parameters added to every request"),
        Setting("cloudflare_client_id", "CLOUDFLARE_ACCESS_CLIENT_ID", accept.header_value, "Cloudflare Access id"),
        Setting(
            "cloudflare_client_secret", "CLOUDFLARE_ACCESS_CLIENT_SECRET", accept.header_value, "Cloudflare Access secret"
        ),
        Setting("proxy", "TINKEX_PROXY", accept.proxy, "the proxy requests go through"),
        Setting("proxy_headers", "TINKEX_PROXY_HEADERS", accept.proxy_headers, "headers for the proxy alone; a proxy-authorization here replaces the proxy's user and password"),
        Setting("ca_file", "TINKEX_CA_FILE", accept.certificates, "certificates (PEM) of authorities to trust besides the system's", "SSL_CERT_FILE"),
        Setting("pool_size", "TINKEX_POOL_SIZE", accept.pool_size, "most connections per purpose (submitting, polling, heartbeats …); unset: as many as requests wait"),
        Setting("poll_backoff", "TINKEX_POLL_BACKOFF", accept.poll_backoff, "first and longest wait, in seconds, between polls that the server answers at once"),
        Setting("circuit_breaker", "TINKEX_CIRCUIT_BREAKER", accept.flag, "whether a server that failed five times in a row is left alone for 5 s, per kind of call"),
        Setting("telemetry", "TINKER_TELEMETRY", accept.flag, "whether anything may be reported to the server about this program"),
        Setting("tracing", "TINKEX_TRACING", accept.flag, "whether OpenTelemetry spans are made, where the program has set up a tracer provider"),
        Setting("log_level", "TINKER_LOG", accept.log_level, "how much the logger 'tinkex' says: debug, info, warning or error"),
        Setting("dump_headers", "TINKEX_DUMP_HEADERS", accept.flag, "whether every request is logged (at info) with its headers, secrets masked"),
        Setting("parity", "TINKEX_PARITY", accept.parity, "whose defaults hold for timeout and max_retries: 'python' (60 s, as many as fit into 300 s) or 'beam' (120 s, 2)"),
        Setting("credential_cmd", "TINKER_CREDENTIAL_CMD", accept.text, "a shell command that prints the credential, for servers that hand out short-lived tokens"),
    )
}  # fmt: skip


# ---- the credentials file ----


def _stored_key(path: Path | None, environ: Mapping[str, str]) -> str | None:
    """The default key that a login left behind, if there is one."""
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
        raise ConfigError(f"{file} is no credentials file: {error!r} is missing; log in again") from error
    except ValueError as error:
        raise ConfigError(f"the default key in {file}: {error}") from error
