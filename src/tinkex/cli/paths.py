"""Checkpoint paths, dates and column lists as command line arguments, checked before anything is sent."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeAlias

import click

if TYPE_CHECKING:
    PathType: TypeAlias = click.ParamType[str]
    MomentType: TypeAlias = click.ParamType[datetime]
else:  # older releases of click have no type arguments
    PathType = MomentType = click.ParamType

__all__ = ["CheckpointName", "CheckpointPath", "Moment", "ObjectId"]

KINDS = ("weights", "sampler_weights", "external_weights")


class CheckpointPath(PathType):
    """``tinker://<run>/<kind>/<name>``, of the given kinds."""

    name = "path"

    def __init__(self, *kinds: str) -> None:
        self.kinds = kinds or KINDS

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The path, or an error that shows the right form."""
        text = str(value)
        parts = text.removeprefix("tinker://").split("/")
        if not text.startswith("tinker://") or len(parts) != 3 or not all(parts) or parts[1] not in KINDS:
            self.fail(
                f"{text!r} is not a checkpoint path; they look like tinker://<run>/weights/<name>. "
                "List yours with: tinkex checkpoint list",
                param,
                ctx,
            )
        if parts[1] not in self.kinds:
            self.fail(f"{text!r} is of kind {parts[1]}; this takes {' or '.join(self.kinds)}", param, ctx)
        return text


class ObjectId(PathType):
    """The id of a run or a session, as a server gives them."""

    name = "id"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The id, or an error where it cannot be one."""
        text = str(value)
        if not text or set(text) & set("/?#\\ "):
            self.fail(
                f"{text!r} is no id; they are listed by: tinkex run list, tinkex session list", param, ctx
            )
        return text


class CheckpointName(PathType):
    """What a new checkpoint is called."""

    name = "name"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The name, or an error that says what names are like."""
        from tinkex.clients._checks import check_name

        try:
            check_name(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)
        return str(value)


class Moment(MomentType):
    """An ISO 8601 date or time; without a zone it is UTC."""

    name = "iso-date"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        """The time, or an error that shows the right form."""
        if isinstance(value, datetime):
            return value
        try:
            when = datetime.fromisoformat(str(value).strip())
        except ValueError:
            self.fail(f"{value!r} is no date; write 2026-01-31 or 2026-01-31T12:00:00Z", param, ctx)
        return when if when.tzinfo is not None else when.replace(tzinfo=UTC)
