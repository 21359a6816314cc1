"""Templates as responses: escaped, with headers that keep the page to what this server sends."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from starlette.responses import Response

HERE = Path(__file__).parent
STATIC = HERE / "static"
SECURITY_HEADERS: Mapping[str, str] = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    # Not no-referrer: the origin of a form would be null.
    "referrer-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}
MEDIA_TYPES: Mapping[str, str] = {
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".LICENSE": "text/plain; charset=utf-8",
}
_UNITS = ("B", "KB", "MB", "GB", "TB", "PB")


def render(template: str, status: int = 200, /, **context: Any) -> Response:
    """Returns a page."""
    text = _environment().get_template(template).render(**context)
    headers = {**SECURITY_HEADERS, "cache-control": "no-store", "vary": "cookie"}
    return Response(text, status, headers, media_type="text/html")


def render_part(template: str, /, **context: Any) -> str:
    """Returns a part of a page, for an event."""
    return _environment().get_template(template).render(**context)


def data(value: object) -> Response:
    """Returns a JSON response for the scripts of a page."""
    headers = {**SECURITY_HEADERS, "cache-control": "no-store", "vary": "cookie"}
    return Response(encode(value), 200, headers, media_type="application/json")


def encode(value: object) -> bytes:
    """Encodes JSON in one line; numbers that are not finite are null."""
    return json.dumps(finite(value), separators=(",", ":"), allow_nan=False).encode()


def finite(value: Any) -> Any:
    """Returns a JSON value whose numbers are finite or None.

    >>> finite({"loss": [1.0, float("nan")]})
    {'loss': [1.0, None]}
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return value


@cache
def static_version() -> str:
    """The digest of all static files, which is part of their addresses, so that browsers keep them."""
    digest = hashlib.sha256()
    for file in sorted(STATIC.rglob("*")):
        if file.is_file():
            digest.update(file.relative_to(STATIC).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]


def static_response(name: str) -> Response | None:
    """Returns a static file, or None if there is none of this name."""
    known = {file.relative_to(STATIC).as_posix(): file for file in STATIC.rglob("*") if file.is_file()}
    file = known.get(name)
    if file is None:
        return None
    headers = {**SECURITY_HEADERS, "cache-control": "public, max-age=31536000, immutable"}
    media_type = MEDIA_TYPES.get(file.suffix, "application/octet-stream")
    return Response(file.read_bytes(), 200, headers, media_type=media_type)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        size=format_size, number=format_number, ago=format_ago, moment=format_moment, seconds=format_seconds
    )
    environment.globals["static"] = f"/dashboard/static/{static_version()}"
    return environment


def format_size(num_bytes: float) -> str:
    """Bytes for people.

    >>> format_size(1_500_000), format_size(12)
    ('1.5 MB', '12 B')
    """
    value = float(num_bytes)
    for unit in _UNITS:
        if abs(value) < 1000 or unit == _UNITS[-1]:
            return f"{value:.0f} {unit}" if unit == "B" or abs(value) >= 100 else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError("the last unit takes all")


def format_number(value: float | None) -> str:
    """A number for people; a dash for none.

    >>> format_number(1234567), format_number(0.123456), format_number(None), format_number(1e-5)
    ('1,234,567', '0.1235', '–', '1e-05')
    """
    if value is None or not math.isfinite(value):
        return "–"
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.4g}"


def format_seconds(seconds: float | None) -> str:
    """A duration for people.

    >>> format_seconds(0.0123), format_seconds(75), format_seconds(90000), format_seconds(None)
    ('12 ms', '1 min 15 s', '1 d 1 h', '–')
    """
    if seconds is None:
        return "–"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    for (unit, length), (smaller, rest) in (
        (("d", 86400), ("h", 3600)),
        (("h", 3600), ("min", 60)),
        (("min", 60), ("s", 1)),
    ):
        if whole >= length:
            more = whole % length // rest
            return f"{whole // length} {unit} {more} {smaller}" if more else f"{whole // length} {unit}"
    raise AssertionError("a minute or more was left")


def format_ago(at: float | None) -> Markup:
    """A time as an element with how long ago it was, or how soon it will be."""
    if at is None:
        return Markup("–")
    left = at - time.time()
    text = "now" if abs(left) < 1 else f"in {_rough(left)}" if left > 0 else f"{_rough(-left)} ago"
    moment = datetime.fromtimestamp(at, UTC)
    return Markup('<time datetime="{}" title="{}">{}</time>').format(
        moment.isoformat(timespec="seconds"), moment.strftime("%Y-%m-%d %H:%M:%S UTC"), text
    )


def format_moment(at: float | None) -> str:
    """A time in UTC."""
    return "–" if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _rough(seconds: float) -> str:
    """A duration in one unit.

    >>> _rough(200), _rough(5.5)
    ('3 min', '5 s')
    """
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return f"{max(1, int(seconds))} s"
