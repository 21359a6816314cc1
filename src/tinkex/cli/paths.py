"""Types of command line arguments, validated before any request: checkpoint paths and names, ids, timestamps."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from tinkex.cli.invocation import Invocation

if TYPE_CHECKING:
    PathType: TypeAlias = click.ParamType[str]
    TimestampType: TypeAlias = click.ParamType[datetime]
else:  # older releases of click have no type arguments
    PathType = TimestampType = click.ParamType

__all__ = ["CheckpointName", "CheckpointPath", "ObjectId", "RunId", "Timestamp"]

KINDS = ("weights", "sampler_weights", "external_weights")


class CheckpointPath(PathType):
    """``tinker://<run>/<kind>/<name>``, restricted to the given kinds; or a short name, which is resolved."""

    name = "checkpoint"

    def __init__(self, *kinds: str) -> None:
        self.kinds = kinds or KINDS

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Returns the path; an invalid one is a usage error that shows the forms."""
        text = str(value)
        if ctx is not None and ctx.resilient_parsing:
            return text
        if ctx is not None and _is_short(text):
            from tinkex.checkpoints.references import resolve_checkpoint

            invocation = ctx.ensure_object(Invocation)
            resolved = resolve_checkpoint(text, invocation.rest(), self.kinds)
            invocation.status(f"{text} is {resolved}")
            return resolved
        parts = text.removeprefix("tinker://").split("/")
        if not text.startswith("tinker://") or len(parts) != 3 or not all(parts) or parts[1] not in KINDS:
            self.fail(
                f"{text!r} is not a checkpoint; write tinker://<run>/weights/<name>, @last, @best, or the directory of a "
                f"run. List checkpoints with: tinkex checkpoint list{_server_options(ctx)}",
                param,
                ctx,
            )
        if parts[1] not in self.kinds:
            self.fail(f"{text!r} has the kind {parts[1]}, not {' or '.join(self.kinds)}", param, ctx)
        return text


def _server_options(ctx: click.Context | None) -> str:
    return "" if ctx is None else ctx.ensure_object(Invocation).server_options


def _is_short(text: str) -> bool:
    """Whether a text is a short name: not a path with all or too many parts, and nothing that no name contains."""
    return bool(text) and not set(text) & set("?#\\ \n") and not text.startswith("tinker:///") and not (
        text.startswith("tinker://") and text.count("/") != 2
    )  # fmt: skip


class ObjectId(PathType):
    """The id of a session."""

    name = "id"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Returns the id; text that cannot be an id is a usage error."""
        text = str(value)
        if not text or set(text) & set("/?#\\ "):
            self.fail(
                f"{text!r} is not an id; list ids with: tinkex run list{_server_options(ctx)}, "
                f"tinkex session list{_server_options(ctx)}",
                param,
                ctx,
            )
        return text


class RunId(ObjectId):
    """The id of a run, ``@last``, the beginning of an id, or the directory of a run."""

    name = "run"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Returns the id of the run."""
        text = str(value)
        if ctx is None or ctx.resilient_parsing or ":" in text:
            return super().convert(text, param, ctx)
        if not text or not Path(text).is_dir():
            super().convert(text, param, ctx)
        from tinkex.checkpoints.references import resolve_run

        return resolve_run(text, ctx.ensure_object(Invocation).rest())


class CheckpointName(PathType):
    """The name of a new checkpoint."""

    name = "name"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Returns the name; an invalid one is a usage error that states the rules."""
        from tinkex.clients._checks import check_name

        try:
            check_name(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)
        return str(value)


class Timestamp(TimestampType):
    """An ISO 8601 date or time; without a time zone it is UTC."""

    name = "iso-date"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        """Returns the time; an invalid one is a usage error that shows the form."""
        if isinstance(value, datetime):
            return value
        try:
            timestamp = datetime.fromisoformat(str(value).strip())
        except ValueError:
            self.fail(f"{value!r} is not a date; write 2026-01-31 or 2026-01-31T12:00:00Z", param, ctx)
        return timestamp if timestamp.tzinfo is not None else timestamp.replace(tzinfo=UTC)
