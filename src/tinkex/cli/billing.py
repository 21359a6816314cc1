"""``tinkex billing``: usage and checkpoint storage."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any

import click

from tinkex.cli.groups import CommandGroup
from tinkex.cli.invocation import Invocation, pass_invocation
from tinkex.errors import SetupError

CSV = "Write the rows to this file as CSV instead of printing a table; '-' is stdout."


@click.group(cls=CommandGroup)
def billing() -> None:
    """Show usage and checkpoint storage."""


@billing.command()
@click.argument("starting_on")
@click.argument("ending_before")
@click.option("--csv", "csv_path", metavar="PATH", help=CSV)
@click.option(
    "--sessions-csv",
    "sessions_path",
    metavar="PATH",
    help="Write the sessions' metadata to this file as CSV; '-' is stdout.",
)
@pass_invocation
def usage(
    invocation: Invocation,
    starting_on: str,
    ending_before: str,
    csv_path: str | None,
    sessions_path: str | None,
) -> None:
    """Show usage per hour. STARTING_ON and ENDING_BEFORE are dates (UTC) or RFC 3339 timestamps.

    \b
    Examples:
      tinkex billing usage 2026-07-13 2026-07-14
      tinkex billing usage 2026-07-13T00:00:00Z 2026-07-14T00:00:00Z --csv usage.csv
    """  # noqa: D301 -- click reads the escape as "keep these lines"
    import json

    from tinkex import types

    try:
        pending = invocation.admin().get_billing_usage(_midnight(starting_on), _midnight(ending_before))
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    found = pending.result()
    rows = [_flat(event.model_dump(mode="json")) for event in found.data]
    if sessions_path is not None:
        session_rows = [
            {
                "session_id": session_id,
                "user_metadata": None if session.user_metadata is None else json.dumps(session.user_metadata),
            }
            for session_id, session in found.sessions.items()
        ]
        _write_csv(session_rows, sessions_path, ("session_id", "user_metadata"))
    if csv_path is not None:
        _write_csv(rows, csv_path, _fields(types.BillingUsageEvent))
    if csv_path is None and sessions_path is None:
        title = f"{len(rows)} row{'s' if len(rows) != 1 else ''}"
        if found.cost_data_through is not None:
            title += f", costs known through {found.cost_data_through.isoformat()}"
        _table(invocation, found.model_dump(mode="json"), rows, title)


@billing.command("checkpoint-storage")
@click.option("--project-id", help="Only this project.")
@click.option("--csv", "csv_path", metavar="PATH", help=CSV)
@pass_invocation
def checkpoint_storage(invocation: Invocation, project_id: str | None, csv_path: str | None) -> None:
    """Show checkpoint storage. Columns are the count, the size in bytes and the cost per month.

    \b
    Examples:
      tinkex billing checkpoint-storage
      tinkex billing checkpoint-storage --csv -
    """  # noqa: D301 -- click reads the escape as "keep these lines"
    from tinkex import types

    found = invocation.admin().get_current_checkpoint_storage_usage(project_id).result()
    rows = [item.model_dump(mode="json") for item in found.data]
    if csv_path is not None:
        _write_csv(rows, csv_path, _fields(types.CurrentCheckpointStorageUsageItem))
        return
    rate = found.effective_rate_usd_per_gigabyte_month
    title = None if rate is None else f"at {rate:g} USD per gigabyte and month"
    _table(invocation, found.model_dump(mode="json"), rows, title)


def _midnight(when: str) -> str:
    """Converts a date to midnight UTC; returns any other text unchanged.

    >>> _midnight("2026-07-13"), _midnight("2026-07-13T06:00:00Z")
    ('2026-07-13T00:00:00Z', '2026-07-13T06:00:00Z')
    """
    try:
        return f"{date.fromisoformat(when).isoformat()}T00:00:00Z"
    except ValueError:
        return when


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    info = row.pop("event_info", None) or {}
    return {**row, **info}


def _columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the columns with at least one value, in order of first appearance."""
    return list(dict.fromkeys(name for row in rows for name, value in row.items() if value is not None))


def _table(
    invocation: Invocation, value: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], title: str | None
) -> None:
    columns = _columns(rows)
    shown = [["" if row.get(name) is None else str(row[name]) for name in columns] for row in rows]
    invocation.table(value, columns or ["(nothing)"], shown, title)


def _fields(kind: type[Any]) -> tuple[str, ...]:
    names: tuple[str, ...] = kind.__struct_fields__
    return tuple(name for name in names if name != "event_info")


def _write_csv(rows: Sequence[Mapping[str, Any]], path: str, first: Sequence[str]) -> None:
    """Writes a header and the rows; ``first`` are the leading columns, written even if there are no rows."""
    import csv
    from contextlib import nullcontext
    from pathlib import Path

    columns = list(dict.fromkeys([*first, *(name for row in rows for name in row)]))
    try:
        with (
            nullcontext(sys.stdout) if path == "-" else Path(path).open("w", newline="", encoding="utf-8")
        ) as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(rows)
            file.flush()
    except OSError as error:
        raise SetupError(f"{path} cannot be written ({error.strerror}); choose another file") from error
