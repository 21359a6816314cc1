"""Which failures are temporary, and how long the server asks to wait."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime

__all__ = ["is_transient", "retry_after"]


def is_transient(status: int) -> bool:
    """Whether the same request can succeed later; with 501 it never does, with 507 not before something is deleted.

    >>> [status for status in (400, 408, 409, 410, 429, 500, 501, 503, 507) if is_transient(status)]
    [408, 409, 429, 500, 503]
    """
    return status in {408, 409, 429} or (status >= 500 and status not in {501, 507})


def retry_after(headers: Mapping[str, str], cap_s: float) -> float | None:
    """The wait that the server requests, at most ``cap_s`` seconds; None if it requests none, or it cannot be parsed.

    A date is compared with the reply's own ``date``, so the local clock may be wrong; it counts only without that header.

    >>> retry_after({"retry-after": "3"}, 60.0), retry_after({"retry-after-ms": "250"}, 60.0)
    (3.0, 0.25)
    """
    seconds = _number(headers.get("retry-after-ms"))
    if seconds is not None:
        seconds /= 1000.0
    else:
        text = headers.get("retry-after")
        seconds = _number(text)
        if seconds is None and text is not None:
            seconds = _seconds_between(headers.get("date"), text)
    if seconds is None or not seconds > 0:
        return None
    return min(seconds, cap_s)


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def _seconds_between(start: str | None, end: str) -> float | None:
    try:
        now = datetime.now(UTC) if start is None else parsedate_to_datetime(start)
        return (parsedate_to_datetime(end) - now) / timedelta(seconds=1)
    except (TypeError, ValueError):
        return None
