"""Validation of the client's settings, and masking of secrets."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

DEFAULT_BASE_URL = "https://tinker.thinkingmachines.dev/services/tinker-prod"
LOCAL = "local"
"""The ``base_url`` of the embedded engine."""

PARITIES: Mapping[str, tuple[float, int | None]] = {"python": (60.0, None), "beam": (120.0, 2)}
"""The default timeout and number of retries of each mode."""
POLL_BACKOFF = (0.05, 5.0)

_TRUE = ("1", "true", "yes", "on")
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


def api_key(value: Any) -> str:
    """A static key or a token."""
    if not isinstance(value, str) or not value.startswith(("tml-", "eyJ")):
        raise ValueError("an API key must start with 'tml-' (or be a token starting with 'eyJ')")
    if not value.isascii() or any(c.isspace() for c in value):
        raise ValueError("the API key contains whitespace or non-ASCII characters; copy it again")
    return value


def base_url(value: Any) -> str:
    """A server's URL, or ``"local"`` for the embedded engine."""
    text = str(value).strip().rstrip("/")
    if text == LOCAL:
        return LOCAL
    parts = urlsplit(text)
    try:
        usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is not a number, or too large
        usable = False
    if not usable:
        raise ValueError(
            f"{without_userinfo(text)!r} is not a server URL; use one such as http://host:8787, or {LOCAL!r}"
        )
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError(
            "a server URL must not contain a user name, query or fragment; set api_key for the key"
        )
    return text


def text(value: Any) -> str:
    """A string that is not blank."""
    text = str(value).strip()
    if not text:
        raise ValueError("the value is blank")
    return text


def tags(value: Any) -> tuple[str, ...]:
    """A list of strings, or one comma-separated string."""
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, Sequence) or not all(isinstance(item, str) for item in items):
        raise ValueError("tags must be a list of strings, or one comma-separated string")
    return tuple(dict.fromkeys(tag for tag in (item.strip() for item in items) if tag))


def user_metadata(value: Any) -> dict[str, Any]:
    """A mapping with string keys."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError("user_metadata must be a mapping with string keys")
    return dict(value)


def timeout(value: Any) -> float:
    """A positive number of seconds."""
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{value!r} is not a number of seconds") from None
    if not (math.isfinite(seconds) and seconds > 0):
        raise ValueError(f"a timeout must be a positive number of seconds, got {value!r}")
    return seconds


def max_retries(value: Any) -> int:
    """An integer ≥ 0."""
    if isinstance(value, bool) or not re.fullmatch(r"\d+", str(value)):
        raise ValueError(f"max_retries must be an integer ≥ 0, got {value!r}")
    return int(value)


def pairs(value: Any) -> dict[str, str]:
    """Names with their values: a mapping, or pairs of name and value; as a string, in JSON.

    >>> pairs({"team": "alpha", "shard": 3}), pairs('[["team", "alpha"]]')
    ({'team': 'alpha', 'shard': '3'}, {'team': 'alpha'})
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise ValueError('expected JSON such as {"x-team": "alpha"} or [["x-team", "alpha"]]') from None
    if isinstance(value, Sequence) and not isinstance(value, str):
        if not all(isinstance(pair, Sequence) and len(pair) == 2 for pair in value):
            raise ValueError("every entry must be a pair of name and value")
        value = {name: item for name, item in value}  # noqa: C416 - JSON gives lists, not tuples
    if not isinstance(value, Mapping):
        raise ValueError("expected a mapping of names to strings")
    for name, item in value.items():
        if not isinstance(name, str) or not name.strip():
            raise ValueError(f"a name must be a string that is not blank, got {name!r}")
        if not isinstance(item, str | int | float) or isinstance(item, bool):
            raise ValueError(f"the value of {name!r} must be a string or a number")
    return {name.strip(): str(item) for name, item in value.items()}


def headers(value: Any) -> dict[str, str]:
    """Valid HTTP headers."""
    found = pairs(value)
    for name, item in found.items():
        if not _HEADER_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not a valid header name")
        header_value(item, name)
    return found


def header_value(value: Any, name: str = "it") -> str:
    """A valid value of an HTTP header."""
    given = text(value)
    if any(ord(c) < 32 or ord(c) == 127 for c in given) or not given.isascii():
        raise ValueError(f"the value of header {name} contains control or non-ASCII characters")
    return given


def proxy(value: Any) -> str:
    """A proxy's URL, which may contain a user and a password."""
    text = str(value).strip()
    parts = urlsplit(text)
    try:
        known = parts.scheme in {"http", "https", "socks5", "socks5h"}
        usable = known and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise ValueError(
            f"{without_userinfo(text)!r} is not a proxy URL; use one such as http://user:password@host:3128 "
            "(http, https, socks5 or socks5h)"
        )
    return text


def flag(value: Any) -> bool:
    """A boolean; as a string 1, true, yes, on or 0, false, no, off."""
    if isinstance(value, bool):
        return value
    word = str(value).strip().lower()
    if word not in {*_TRUE, "0", "false", "no", "off"}:
        raise ValueError(f"{value!r} is not a boolean; use 1, true, yes, on or 0, false, no, off")
    return word in _TRUE


def parity(value: Any) -> str:
    """The defaults to use: those of the official Python client, or of the Elixir one."""
    word = {"elixir": "beam"}.get(str(value).strip().lower(), str(value).strip().lower())
    if word not in PARITIES:
        raise ValueError(f"{value!r} is not a parity mode; use 'python' or 'beam' (alias 'elixir')")
    return word


def log_level(value: Any) -> str:
    """A log level."""
    word = {"warn": "warning"}.get(str(value).strip().lower(), str(value).strip().lower())
    if word not in {"debug", "info", "warning", "error"}:
        raise ValueError(f"{value!r} is not a log level; use debug, info, warning or error")
    return word


def poll_backoff(value: Any) -> tuple[float, float]:
    """Initial and maximum back-off between polls that the server answers immediately, in seconds."""
    if value is True or (isinstance(value, str) and value.strip().lower() in {"exponential", *_TRUE}):
        return POLL_BACKOFF
    if isinstance(value, str):
        value = value.split(",")
    try:
        initial, maximum = (float(part) for part in value)
    except (TypeError, ValueError):
        raise ValueError(
            f"{value!r} is neither a pair of seconds such as (0.05, 5) nor 'exponential'; "
            "polling without back-off is not supported"
        ) from None
    if not (0 < initial <= maximum < math.inf):
        raise ValueError(
            f"the initial back-off must be positive and at most the maximum, got {initial:g} and {maximum:g}"
        )
    return initial, maximum


def pool_size(value: Any) -> int:
    """The maximum number of connections per purpose."""
    if isinstance(value, bool) or not re.fullmatch(r"[1-9]\d*", str(value).strip()):
        raise ValueError(f"pool_size must be an integer ≥ 1, got {value!r}")
    return int(value)


def count(value: Any) -> int:
    """An integer ≥ 1."""
    if isinstance(value, bool) or not re.fullmatch(r"[1-9]\d*", str(value).strip()):
        raise ValueError(f"expected an integer ≥ 1, got {value!r}")
    return int(value)


def certificates(value: Any) -> Path:
    """A file of PEM certificates."""
    path = Path(str(value)).expanduser()
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{str(path)!r} cannot be read ({error.strerror})") from None
    if b"-----BEGIN CERTIFICATE-----" not in content:
        raise ValueError(f"{str(path)!r} contains no PEM certificate")
    return path


def masked(name: str, value: Any) -> Any:
    """Returns a setting's value with secrets masked: names of headers and parameters, never their values."""
    if value is None:
        return None
    if name == "api_key":
        return mask(value)
    if name in {"cloudflare_client_secret", "credential_cmd"}:
        return "…"
    if name == "proxy":
        return without_userinfo(value)
    if name in {"default_headers", "default_query", "proxy_headers"}:
        return dict.fromkeys(value, "…")
    return value


def mask(secret: str) -> str:
    """Masks a secret: keeps its prefix, and the last four characters of long ones.

    >>> mask("tml-0123456789abcdef"), mask("tml-short")
    ('tml-…cdef', 'tml-…')
    """
    head = secret[:4] if secret.startswith("tml-") else secret[:3] if secret.startswith("eyJ") else ""
    return f"{head}…{secret[-4:]}" if len(secret) >= 20 else f"{head}…"


def without_userinfo(url: str) -> str:
    """Returns a URL without its user and password."""
    parts = urlsplit(url)
    if "@" not in parts.netloc:
        return url
    return urlunsplit(parts._replace(netloc="…@" + parts.netloc.rpartition("@")[2]))
