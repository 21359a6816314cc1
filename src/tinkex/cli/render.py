"""Formats results: tables, JSON, sizes and relative times."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

__all__ = ["as_json", "or_missing", "print_table", "relative_time", "size", "yes_no"]

MISSING = "N/A"
PROPERTIES = ["Property", "Value"]
UNITS = ("B", "KB", "MB", "GB", "TB", "PB", "EB")


def as_json(value: Mapping[str, Any]) -> str:
    """Returns indented JSON; dates and other values without a JSON form become strings.

    >>> print(as_json({"at": datetime(2026, 1, 2, tzinfo=UTC)}))
    {
      "at": "2026-01-02T00:00:00Z"
    }
    """
    # A stdout that cannot encode every character gets JSON escapes.
    ascii_only = "utf" not in (getattr(sys.stdout, "encoding", None) or "utf-8").lower()
    return json.dumps(value, indent=2, ensure_ascii=ascii_only, default=_text)


def _text(value: object) -> str:
    if isinstance(value, datetime):
        return value.isoformat().replace("+00:00", "Z")
    return str(value)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str | None = None) -> None:
    """Prints a table on stdout; lines are not wrapped if stdout is not a terminal.

    If the terminal is too narrow, prints each row as a block of lines, so that paths and ids can be copied.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    # rich would turn colons in ids into emoji and brackets into styles.
    console = Console(emoji=False, markup=False, highlight=False)
    unlimited = Console(emoji=False, markup=False, highlight=False, width=10_000)
    if not sys.stdout.isatty() and "COLUMNS" not in os.environ:
        console = unlimited
    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, style="cyan" if index == 0 else None, overflow="fold")
    for row in rows:
        table.add_row(*row)
    if rows and unlimited.measure(table).maximum > console.width:
        print_blocks(columns, rows, title)
    else:
        console.print(table)


def print_blocks(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str | None = None) -> None:
    """Prints each row as a block with one line per value.

    >>> print_blocks(["Run ID", "LoRA"], [["a:train:0", "Rank 8"]])
    Run ID  a:train:0
    LoRA    Rank 8
    """
    import click

    if title is not None:
        click.echo(f"{title}\n")
    if list(columns) == PROPERTIES:  # each row is already a name and a value
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
    """Formats a number of bytes; a unit is 1024 of the previous one.

    >>> size(512), size(1536), size(None)
    ('512 B', '1.5 KB', 'N/A')
    """
    if num_bytes is None or num_bytes < 0:
        return MISSING
    amount, unit = float(num_bytes), 0
    while amount >= 1024 and unit < len(UNITS) - 1:
        amount, unit = amount / 1024, unit + 1
    return f"{num_bytes} B" if unit == 0 else f"{amount:.1f} {UNITS[unit]}"


def relative_time(when: datetime | None, *, now: datetime | None = None, missing: str = MISSING) -> str:
    """Formats a time relative to ``now`` (default: the current time), or as a date if it is more than 30 days away.

    >>> noon = datetime(2026, 5, 1, 12, tzinfo=UTC)
    >>> relative_time(datetime(2026, 5, 1, 9, 30, tzinfo=UTC), now=noon)
    '2 hours ago'
    >>> relative_time(datetime(2026, 5, 5, 12, tzinfo=UTC), now=noon), relative_time(None, missing="Never")
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
    """Formats a boolean as Yes, No, or N/A for None.

    >>> yes_no(True), yes_no(None)
    ('Yes', 'N/A')
    """
    return MISSING if value is None else "Yes" if value else "No"


def or_missing(value: object) -> str:
    """Formats a value as text, or N/A if it is None or empty.

    >>> or_missing(None), or_missing(3)
    ('N/A', '3')
    """
    return MISSING if value is None or value == "" else str(value)
