"""The server's log: text lines, or one JSON object per line.

The fields of a record (``extra={"fields": {...}}``) become ``name=value`` pairs or JSON keys. They never contain API
keys, URLs with tokens, or data.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TextIO

__all__ = ["JsonLines", "TextLines", "set_up_logs"]


class TextLines(logging.Formatter):
    """One line per record.

    >>> record = logging.LogRecord("tinkex.access", logging.INFO, "", 0, "call", (), None)
    >>> record.fields = {"user": "ada", "status": 200}
    >>> TextLines().format(record).partition(" ")[2]
    'INFO tinkex.access: call user=ada status=200'
    """

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line, followed by the traceback if there is one."""
        fields = "".join(f" {name}={_quote(value)}" for name, value in _fields(record).items())
        line = f"{_timestamp(record)} {record.levelname} {record.name}: {record.getMessage()}{fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonLines(logging.Formatter):
    """One JSON object per record.

    >>> record = logging.LogRecord("tinkex.access", logging.INFO, "", 0, "call", (), None)
    >>> record.fields = {"user": "ada", "status": 200}
    >>> line = json.loads(JsonLines().format(record))
    >>> line["level"], line["message"], line["user"], line["status"]
    ('info', 'call', 'ada', 200)
    """

    def format(self, record: logging.LogRecord) -> str:
        """Returns the object as one line."""
        entry: dict[str, object] = {
            "time": _timestamp(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            entry["trace"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)


def set_up_logs(form: str, level: str, *, access: bool, stream: TextIO | None = None) -> None:
    """Writes the log of this process to stderr; requests are logged only with ``access``."""
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    logging.getLogger("tinkex.access").setLevel(logging.INFO if access else logging.WARNING)


def _fields(record: logging.LogRecord) -> Mapping[str, object]:
    fields: Mapping[str, object] = getattr(record, "fields", {})
    return fields


def _timestamp(record: logging.LogRecord) -> str:
    created = datetime.fromtimestamp(record.created, UTC)
    return created.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _quote(value: object) -> str:
    text = str(value)
    return text if text.isprintable() and " " not in text and text else json.dumps(text)
