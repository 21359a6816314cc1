"""How results look: tables by rich, JSON, and sizes and times in words."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

__all__ = ["as_json", "moment", "or_missing", "print_table", "size", "yes_no"]

MISSING = "N/A"
PROPERTIES = ["Property", "Value"]
UNITS = ("B", "KB", "MB", "GB", "TB", "PB")


def as_json(value: Mapping[str, Any]) -> str:
    """Indented JSON; dates and other values without a JSON form become text.

    >>> print(as_json({"at": datetime(2026, 1, 2, tzinfo=UTC)}))
    {
      "at": "2026-01-02T00:00:00Z"
    }
    """
    # Where letters would be lost on the way out, JSON has its own way to write them.
    ascii_only = "utf" not in (getattr(sys.stdout, "encoding", None) or "utf-8").lower()
    return json.dumps(value, indent=2, ensure_ascii=ascii_only, default=_text)


def _text(value: object) -> str:
    if isinstance(value, datetime):
        return value.isoformat().replace("+00:00", "Z")
    return str(value)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str | None = None) -> None:
    """Draws a table on stdout; where stdout is no terminal, lines are as long as they need to be.

    Where a terminal is too narrow, rows become blocks of lines, so that paths and ids can still be copied.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    # Ids contain colons that would become emoji, and brackets that would become styles.
    console = Console(emoji=False, markup=False, highlight=False)
    endless = Console(emoji=False, markup=False, highlight=False, width=10_000)
    if not sys.stdout.isatty() and "COLUMNS" not in os.environ:
        console = endless
    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for place, column in enumerate(columns):
        table.add_column(column, style="cyan" if place == 0 else None, overflow="fold")
    for row in rows:
        table.add_row(*row)
    if rows and endless.measure(table).maximum > console.width:
        print_blocks(columns, rows, title)
    else:
        console.print(table)


def print_blocks(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str | None = None) -> None:
    """Prints rows one below the other, a line per value, which the terminal may wrap.

    >>> print_blocks(["Run ID", "LoRA"], [["a:train:0", "Rank 8"]])
    Run ID  a:train:0
    LoRA    Rank 8
    """
    import click

    if title is not None:
        click.echo(f"{title}\n")
    if list(columns) == PROPERTIES:  # names and values already
        width = max(len(name) for name, _ in rows)
        click.echo("\n".join(f"{name:<{width}}  {value}" for name, value in rows))
        return
    width = max(map(len, columns))
    blocks = [
        "\n".join(f"{name:<{width}}  {value}" for name, value in zip(columns, row, strict=True))
        for row in rows
    ]
    click.echo("\n\n".join(blocks))


def size(num_bytes: int | None) -> str:
    """A number of bytes in steps of 1024.

    >>> size(512), size(1536), size(None)
    ('512 B', '1.5 KB', 'N/A')
    """
    if num_bytes is None or num_bytes < 0:
        return MISSING
    amount, unit = float(num_bytes), 0
    while amount >= 1024 and unit < len(UNITS) - 1:
        amount, unit = amount / 1024, unit + 1
    return f"{num_bytes} B" if unit == 0 else f"{amount:.1f} {UNITS[unit]}"


def moment(when: datetime | None, *, now: datetime | None = None, missing: str = MISSING) -> str:
    """A time as seen from now: minutes to weeks in words, a date beyond 30 days.

    >>> noon = datetime(2026, 5, 1, 12, tzinfo=UTC)
    >>> moment(datetime(2026, 5, 1, 9, 30, tzinfo=UTC), now=noon)
    '2 hours ago'
    >>> moment(datetime(2026, 5, 5, 12, tzinfo=UTC), now=noon), moment(None, missing="Never")
    ('in 4 days', 'Never')
    """
    if when is None:
        return missing
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    seconds = ((now or datetime.now(UTC)) - when).total_seconds()
    distance = abs(seconds)
    days = int(distance // 86_400)
    if days > 30:
        return when.astimezone(UTC).strftime("%Y-%m-%d")
    if days > 7:
        words = _count(days // 7, "week")
    elif days > 0:
        words = _count(days, "day")
    elif distance > 3600:
        words = _count(int(distance // 3600), "hour")
    elif distance > 60:
        words = _count(int(distance // 60), "minute")
    else:
        return "just now" if seconds >= 0 else "in less than a minute"
    return f"{words} ago" if seconds >= 0 else f"in {words}"


def _count(number: int, unit: str) -> str:
    return f"{number} {unit}{'' if number == 1 else 's'}"


def yes_no(value: bool | None) -> str:
    """Yes, No, or that it is not known.

    >>> yes_no(True), yes_no(None)
    ('Yes', 'N/A')
    """
    return MISSING if value is None else "Yes" if value else "No"


def or_missing(value: object) -> str:
    """A value as text, or that there is none.

    >>> or_missing(None), or_missing(3)
    ('N/A', '3')
    """
    return MISSING if value is None or value == "" else str(value)
