"""What each setting of the client accepts, and how it may be shown."""

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
"""The ``base_url`` of the engine inside this process."""

PARITIES: Mapping[str, tuple[float, int | None]] = {"python": (60.0, None), "beam": (120.0, 2)}
"""The timeout and the number of retries that each mode has by default."""
POLL_BACKOFF = (0.05, 5.0)

_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


def api_key(value: Any) -> str:
    """A static key or a token."""
    if not isinstance(value, str) or not value.startswith(("tml-", "eyJ")):
        raise ValueError("an API key starts with 'tml-' (or is a token starting with 'eyJ')")
    if not value.isascii() or any(c.isspace() for c in value):
        raise ValueError("the API key contains spaces or characters that no key has; copy it again")
    return value


def base_url(value: Any) -> str:
    """A server's address, or the word for the engine in this process."""
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
            f"{without_userinfo(text)!r} is no server address; "
            f"it looks like http://host:8787, or is the word {LOCAL!r}"
        )
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError("a server address holds no user name, query or fragment; the key goes into api_key")
    return text


def text(value: Any) -> str:
    """Any text that is not blank."""
    text = str(value).strip()
    if not text:
        raise ValueError("the text is blank")
    return text


def tags(value: Any) -> tuple[str, ...]:
    """A list of words, also as one text with commas."""
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, Sequence) or not all(isinstance(item, str) for item in items):
        raise ValueError("tags are a list of texts, or one text with commas between them")
    return tuple(dict.fromkeys(tag for tag in (item.strip() for item in items) if tag))


def user_metadata(value: Any) -> dict[str, Any]:
    """A mapping whose keys are texts."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError("user_metadata is a mapping whose keys are texts")
    return dict(value)


def timeout(value: Any) -> float:
    """A positive number of seconds."""
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{value!r} is not a number of seconds") from None
    if not (math.isfinite(seconds) and seconds > 0):
        raise ValueError(f"a timeout is a positive number of seconds, got {value!r}")
    return seconds


def max_retries(value: Any) -> int:
    """A whole number from 0 on."""
    if isinstance(value, bool) or not re.fullmatch(r"\d+", str(value)):
        raise ValueError(f"max_retries is a whole number ≥ 0, got {value!r}")
    return int(value)


def pairs(value: Any) -> dict[str, str]:
    """A mapping of names to texts; as text, a JSON object."""
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


def headers(value: Any) -> dict[str, str]:
    """Headers that HTTP can carry."""
    found = pairs(value)
    for name, item in found.items():
        if not _HEADER_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not a header name")
        header_value(item, name)
    return found


def header_value(value: Any, name: str = "it") -> str:
    """The value of a header."""
    given = text(value)
    if any(ord(c) < 32 or ord(c) == 127 for c in given) or not given.isascii():
        raise ValueError(f"the value of header {name} has characters that HTTP does not carry")
    return given


def proxy(value: Any) -> str:
    """The address of a proxy, which may hold a user and a password."""
    text = str(value).strip()
    parts = urlsplit(text)
    try:
        usable = parts.scheme in {"http", "https", "socks5", "socks5h"} and bool(parts.hostname)
        _ = parts.port
    except ValueError:
        usable = False
    if not usable:
        raise ValueError(
            f"{without_userinfo(text)!r} is no proxy address; it looks like http://user:password@host:3128 "
            "(http, https, socks5 or socks5h)"
        )
    return text


def proxy_headers(value: Any) -> dict[str, str]:
    """Headers for the proxy: a mapping, or pairs of name and text; as text, in JSON."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise ValueError('expected JSON such as {"x-route": "a"} or [["x-route", "a"]]') from None
    if isinstance(value, Sequence) and not isinstance(value, str):
        if not all(isinstance(pair, Sequence) and len(pair) == 2 for pair in value):
            raise ValueError("every entry must be a pair of name and text")
        value = {name: text for name, text in value}  # noqa: C416 - JSON gives lists, not tuples
    return headers(value)


def flag(value: Any) -> bool:
    """Yes or no; as text 1, true, yes, on or 0, false, no, off."""
    if isinstance(value, bool):
        return value
    word = str(value).strip().lower()
    if word not in {"1", "true", "yes", "on", "0", "false", "no", "off"}:
        raise ValueError(f"{value!r} is neither yes (1, true, yes, on) nor no (0, false, no, off)")
    return word in {"1", "true", "yes", "on"}


def parity(value: Any) -> str:
    """Whose defaults hold: those of the official Python client, or of the Elixir one."""
    word = {"elixir": "beam"}.get(str(value).strip().lower(), str(value).strip().lower())
    if word not in PARITIES:
        raise ValueError(f"{value!r} is no parity mode; there are 'python' and 'beam' (also called 'elixir')")
    return word


def log_level(value: Any) -> str:
    """How much is logged."""
    word = {"warn": "warning"}.get(str(value).strip().lower(), str(value).strip().lower())
    if word not in {"debug", "info", "warning", "error"}:
        raise ValueError(f"{value!r} is no log level; there are debug, info, warning and error")
    return word


def poll_backoff(value: Any) -> tuple[float, float]:
    """First and longest wait between polls that the server answers at once, in seconds."""
    if isinstance(value, str) and value.strip().lower() == "exponential":
        return POLL_BACKOFF
    if isinstance(value, str):
        value = value.split(",")
    try:
        first, longest = (float(part) for part in value)
    except (TypeError, ValueError):
        raise ValueError(
            f"{value!r} is no pair of seconds such as (0.05, 5), nor the word 'exponential'; "
            "there is no polling without back-off, because it would spin"
        ) from None
    if not (0 < first <= longest < math.inf):
        raise ValueError(f"the first wait is positive and at most the longest, got {first:g} and {longest:g}")
    return first, longest


def pool_size(value: Any) -> int:
    """How many connections each purpose may have."""
    if isinstance(value, bool) or not re.fullmatch(r"[1-9]\d*", str(value).strip()):
        raise ValueError(f"pool_size is a whole number of connections ≥ 1, got {value!r}")
    return int(value)


def certificates(value: Any) -> Path:
    """A file with certificates in PEM."""
    path = Path(str(value)).expanduser()
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{str(path)!r} cannot be read ({error.strerror})") from None
    if b"-----BEGIN CERTIFICATE-----" not in content:
        raise ValueError(f"{str(path)!r} holds no certificate in PEM")
    return path


def masked(name: str, value: Any) -> Any:
    """A setting's value as it may be shown: names of headers and parameters, never what they say."""
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
    """A secret as it may be shown: its kind, and for long ones the last four characters.

    >>> mask("tml-0123456789abcdef"), mask("tml-short")
    ('tml-…cdef', 'tml-…')
    """
    head = secret[:4] if secret.startswith("tml-") else secret[:3] if secret.startswith("eyJ") else ""
    return f"{head}…{secret[-4:]}" if len(secret) >= 20 else f"{head}…"


def without_userinfo(url: str) -> str:
    """An address without the user and the password in it."""
    parts = urlsplit(url)
    if "@" not in parts.netloc:
        return url
    return urlunsplit(parts._replace(netloc="…@" + parts.netloc.rpartition("@")[2]))
