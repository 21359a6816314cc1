"""Redaction: which fields of an event telemetry sends, and the masking of secrets in a program's own data."""

from __future__ import annotations

import math
import re
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tinkex.observability.events import (
    CircuitChanged,
    HeartbeatLost,
    QueueStateChanged,
    RequestFinished,
    SessionLost,
    StillWaiting,
    StreamingUnavailable,
)

__all__ = ["SentData", "event_data", "frames", "redact"]

REPORTED: Mapping[type[Any], tuple[str, ...]] = {
    QueueStateChanged: ("request_type", "state"),
    StillWaiting: ("request_type", "waited_s", "state"),
    HeartbeatLost: ("silent_s",),
    SessionLost: (),
    CircuitChanged: ("purpose", "endpoint", "state"),
    StreamingUnavailable: ("status",),
    RequestFinished: ("endpoint", "attempt", "status", "elapsed_s"),
}
"""The events that are reported, and the fields of each; free text, which may quote user data, is excluded."""

MAX_TEXT_LENGTH = 200
MAX_FIELDS = 50
MAX_NAME_LENGTH = 100
MASK = "…"
MIN_SECRET_LENGTH = 8
"""Shorter secrets are not masked inside of text: they occur in other words."""

_SECRET_WORDS = frozenset(
    [
        "auth",
        "authorization",
        "bearer",
        "cookie",
        "credential",
        "credentials",
        "passphrase",
        "passwd",
        "password",
        "pwd",
        "secret",
        "secrets",
    ]
)
"""Words in the name of a field whose value is always masked."""
_SECRET_LAST_WORDS = frozenset({"apikey", "jwt", "key", "pin", "token"})
"""Words at the end of a name whose text is masked; numbers are kept, because they may count something."""
_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_SECRET_TEXT = re.compile(
    r"tml-[\w-]+|eyJ[\w-]+(?:\.[\w-]*)*|(?:sk|pk|rk)-[\w-]{8,}|hf_\w{8,}|gh[a-z]_\w{8,}|github_pat_\w+|xox[a-z]-[\w-]+"
    r"|AKIA[0-9A-Z]{12,}|AIza[\w-]{20,}|(?<=://)[^/@\s]+(?=@)|(?<=bearer )\S+|(?<=basic )\S+",
    re.IGNORECASE,
)
"""Texts that look like keys, tokens, or the user and password of a URL."""
PACKAGE = Path(__file__).parents[2]


def event_data(event: object) -> dict[str, Any] | None:
    """Returns the reported fields of an event, or None if the event is not reported.

    >>> event_data(StreamingUnavailable("session-1:sample:0", 404))
    {'status': 404}
    """
    names = REPORTED.get(type(event))
    return None if names is None else {name: getattr(event, name) for name in names}


class SentData(NamedTuple):
    """The fields that are sent, with secrets masked, and the names of those that are not."""

    fields: dict[str, Any]
    dropped: tuple[str, ...]


def redact(data: Mapping[Any, Any], secrets: Iterable[str] = ()) -> SentData:
    """Returns what may be sent of a program's data: numbers, booleans, None, and strings of at most 200 characters.

    A field whose name says that it holds a secret is masked, and so is text that looks like one or contains one of
    ``secrets``.

    >>> redact({"step": 3, "note": "key tml-abc", "hf_token": "abc", "batch": [1, 2]})
    SentData(fields={'step': 3, 'note': 'key …', 'hf_token': '…'}, dropped=('batch',))
    """
    fields: dict[str, Any] = {}
    dropped: list[str] = []
    known = [secret for secret in secrets if len(secret) >= MIN_SECRET_LENGTH]
    for name, value in data.items():
        plain = value.item() if getattr(value, "ndim", None) == 0 else value  # a numpy or torch scalar
        if isinstance(plain, float) and not math.isfinite(plain):
            plain = str(plain)  # JSON has no such number
        short = isinstance(plain, str) and len(plain) <= MAX_TEXT_LENGTH
        if (
            not isinstance(name, str)
            or len(name) > MAX_NAME_LENGTH
            or len(fields) >= MAX_FIELDS
            or not (short or isinstance(plain, int | float | None))
        ):
            dropped.append(_encodable(str(name))[:MAX_NAME_LENGTH])
        else:
            fields[_masked(_encodable(name), known)] = _masked_value(name, plain, known)
    return SentData(fields, tuple(dropped))


def _masked_value(name: str, value: Any, secrets: Sequence[str]) -> Any:
    words = [word.lower() for word in _WORDS.findall(name)]
    if not _SECRET_WORDS.isdisjoint(words) and value is not None and not isinstance(value, bool):
        return MASK
    if not isinstance(value, str):
        return value
    if words and words[-1] in _SECRET_LAST_WORDS:
        return MASK
    return _masked(_encodable(value), secrets)


def _masked(text: str, secrets: Sequence[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, MASK)
    return _SECRET_TEXT.sub(MASK, text)


def _encodable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()  # a lone surrogate would fail the batch


def frames(error: BaseException) -> str:
    """Returns the stack frames of an exception: those of this package, and only the number of all others."""
    lines: list[str] = []
    skipped = 0
    for frame in traceback.extract_tb(error.__traceback__):
        path = Path(frame.filename)
        if path.is_relative_to(PACKAGE):
            lines.append(f"{path.relative_to(PACKAGE)}:{frame.lineno} in {frame.name}")
        else:
            skipped += 1
    return "\n".join([*lines, f"and {skipped} frames of other code"])
