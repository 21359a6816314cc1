"""Every setting of the client: where it is read from, its default, and what it accepts.

A setting given as an argument wins over its environment variable, which wins over the default; an empty
environment variable counts as unset. The API key has one more source, ``~/.tinker/credentials.json``.

>>> config = Config.resolve(api_key="tml-0123456789abcdef", environ={"TINKER_TAGS": "sweep, lr"})
>>> config.tags, config.timeout
(('sweep', 'lr'), 60.0)
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from tinkex.errors import ConfigError

__all__ = ["DEFAULT_BASE_URL", "LOCAL", "SETTINGS", "Config", "Setting"]

DEFAULT_BASE_URL = "https://tinker.thinkingmachines.dev/services/tinker-prod"
LOCAL = "local"
"""The ``base_url`` of the engine inside this process."""

_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_SECRET_HEADERS = frozenset({"x-api-key", "authorization", "proxy-authorization", "cf-access-client-secret"})


@dataclass(frozen=True)
class Setting:
    """One row of the table of settings."""

    name: str
    env: str | None
    read: Callable[[Any], Any]
    """Checks a value and brings it into its final form; raises ValueError that says what is wrong."""
    meaning: str


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
    credential_cmd: str | None = None

    def __post_init__(self) -> None:
        for name, setting in SETTINGS.items():
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, _read(setting, value, f"Config({name}=…)"))

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
            elif setting.env and environ.get(setting.env, "").strip():
                values[name] = _read(
                    setting, environ[setting.env].strip(), f"environment variable {setting.env}"
                )
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
        shown = ", ".join(f"{f.name}={_masked(f.name, getattr(self, f.name))!r}" for f in fields(self))
        return f"Config({shown})"


def _read(setting: Setting, value: Any, source: str) -> Any:
    try:
        return setting.read(value)
    except ValueError as error:
        raise ConfigError(f"{source}: {error}") from error


# ---- what each setting accepts ----


def _api_key(value: Any) -> str:
    if not isinstance(value, str) or not value.startswith(("tml-", "eyJ")):
        raise ValueError("an API key starts with 'tml-' (or is a token starting with 'eyJ')")
    if not value.isascii() or any(c.isspace() for c in value):
        raise ValueError("the API key contains spaces or characters that no key has; copy it again")
    return value


def _base_url(value: Any) -> str:
    text = str(value).strip().rstrip("/")
    if text == LOCAL:
        return LOCAL
    parts = urlsplit(text)
    try:
        usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is no number, or too large
        usable = False
    if not usable:
        raise ValueError(
            f"{_without_userinfo(text)!r} is no server address; "
            f"it looks like http://host:8787, or is the word {LOCAL!r}"
        )
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError("a server address holds no user name, query or fragment; the key goes into api_key")
    return text


def _text(value: Any) -> str:
    text = str(value).strip()
    if not text:
        raise ValueError("the text is blank")
    return text


def _tags(value: Any) -> tuple[str, ...]:
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, Sequence) or not all(isinstance(item, str) for item in items):
        raise ValueError("tags are a list of texts, or one text with commas between them")
    return tuple(dict.fromkeys(tag for tag in (item.strip() for item in items) if tag))


def _user_metadata(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError("user_metadata is a mapping whose keys are texts")
    return dict(value)


def _timeout(value: Any) -> float:
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{value!r} is not a number of seconds") from None
    if not (math.isfinite(seconds) and seconds > 0):
        raise ValueError(f"a timeout is a positive number of seconds, got {value!r}")
    return seconds


def _max_retries(value: Any) -> int:
    if isinstance(value, bool) or not re.fullmatch(r"\d+", str(value)):
        raise ValueError(f"max_retries is a whole number ≥ 0, got {value!r}")
    return int(value)


def _pairs(value: Any) -> dict[str, str]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise ValueError('expected a JSON object such as {"x-team": "alpha"}') from None
    if not isinstance(value, Mapping):
        raise ValueError("expected a mapping of names to texts")
    for name, item in value.items():
        if not isinstance(name, str) or not isinstance(item, str | int | float) or isinstance(item, bool):
            raise ValueError(f"the value of {name!r} must be a text or a number")
    return {str(name): str(item) for name, item in value.items()}


def _headers(value: Any) -> dict[str, str]:
    pairs = _pairs(value)
    for name, text in pairs.items():
        if not _HEADER_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not a header name")
        _header_value(text, name)
    return pairs


def _header_value(value: Any, name: str = "it") -> str:
    text = _text(value)
    if any(ord(c) < 32 or ord(c) == 127 for c in text) or not text.isascii():
        raise ValueError(f"the value of header {name} has characters that HTTP does not carry")
    return text


def _proxy(value: Any) -> str:
    text = str(value).strip()
    parts = urlsplit(text)
    try:
        usable = parts.scheme in {"http", "https", "socks5", "socks5h"} and bool(parts.hostname)
        _ = parts.port
    except ValueError:
        usable = False
    if not usable:
        raise ValueError(
            f"{_without_userinfo(text)!r} is no proxy address; it looks like http://user:password@host:3128 "
            "(http, https, socks5 or socks5h)"
        )
    return text


SETTINGS: Mapping[str, Setting] = {
    row.name: row
    for row in (
        Setting("api_key", "TINKER_API_KEY", _api_key, "the credential sent with every call"),
        Setting("base_url", "TINKER_BASE_URL", _base_url, f"the server, or {LOCAL!r} for the engine in-process"),
        Setting("project_id", "TINKER_PROJECT_ID", _text, "the project new sessions belong to"),
        Setting("tags", "TINKER_TAGS", _tags, "words attached to new sessions, to find them again"),
        Setting("user_metadata", None, _user_metadata, "anything worth keeping with new sessions"),
        Setting("timeout", "TINKEX_TIMEOUT", _timeout, "seconds one request may take"),
        Setting(
            "max_retries",
            "TINKEX_MAX_RETRIES",
            _max_retries,
            "further tries of a failed request; unset: as many as fit into 300 s",
        ),
        Setting("default_headers", "TINKEX_DEFAULT_HEADERS", _headers, "headers added to every request"),
        Setting("default_query", "TINKEX_DEFAULT_QUERY", _pairs, "query parameters added to every request"),
        Setting("cloudflare_client_id", "CLOUDFLARE_ACCESS_CLIENT_ID", _header_value, "Cloudflare Access id"),
        Setting(
            "cloudflare_client_secret", "CLOUDFLARE_ACCESS_CLIENT_SECRET", _header_value, "Cloudflare Access secret"
        ),
        Setting("proxy", "TINKEX_PROXY", _proxy, "the proxy requests go through"),
        Setting("credential_cmd", "TINKER_CREDENTIAL_CMD", _text, "a shell command that prints the credential, for servers that hand out short-lived tokens"),
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
        return _api_key(stored["keys"][default]["key"])
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{file} is no credentials file: {error!r} is missing; log in again") from error
    except ValueError as error:
        raise ConfigError(f"the default key in {file}: {error}") from error


# ---- masking ----


def _masked(name: str, value: Any) -> Any:
    if value is None:
        return None
    if name == "api_key":
        return mask(value)
    if name in {"cloudflare_client_secret", "credential_cmd"}:
        return "…"
    if name == "proxy":
        return _without_userinfo(value)
    if name == "default_headers":
        return {header: "…" if header.lower() in _SECRET_HEADERS else v for header, v in value.items()}
    return value


def mask(secret: str) -> str:
    """A secret as it may be shown: its kind, and for long ones the last four characters.

    >>> mask("tml-0123456789abcdef"), mask("tml-short")
    ('tml-…cdef', 'tml-…')
    """
    head = secret[:4] if secret.startswith("tml-") else secret[:3] if secret.startswith("eyJ") else ""
    return f"{head}…{secret[-4:]}" if len(secret) >= 20 else f"{head}…"


def _without_userinfo(url: str) -> str:
    parts = urlsplit(url)
    if "@" not in parts.netloc:
        return url
    return urlunsplit(parts._replace(netloc="…@" + parts.netloc.rpartition("@")[2]))
