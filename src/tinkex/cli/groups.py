"""Click groups and commands with what every ``tinkex`` command shares: lazy loading and the common options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import click

from tinkex.cli.invocation import Invocation

__all__ = ["EXIT_CODES", "LazyGroup", "Leaf", "Noun"]

EXIT_CODES = (
    "Exit codes: 0 done, 1 failed (also when only some of many items failed), 2 wrong usage, 130 interrupted."
)


HELP_NAMES = ["-h", "--help"]


class _Helped(click.Command):
    """A command that knows -h whatever context it is first used in: it keeps the help option it made then."""

    def get_help_option_names(self, ctx: click.Context) -> list[str]:
        """The same names in every context."""
        del ctx
        return list(HELP_NAMES)


class LazyGroup(_Helped, click.Group):
    """A group whose commands are imported when they are named, so that help stays quick."""

    def __init__(self, *args: Any, places: Mapping[str, str], **more: Any) -> None:
        super().__init__(*args, **more)
        self._places = places

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Every command, in the order of the table."""
        del ctx
        return list(self._places)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """One command, imported now."""
        del ctx
        place = self._places.get(cmd_name)
        if place is None:
            return None
        module, _, attribute = place.partition(":")
        command = getattr(import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The named command; a name that is nearly one is answered with that one."""
        if args and args[0] not in self._places and not ctx.resilient_parsing:
            from difflib import get_close_matches

            near = get_close_matches(args[0], self._places, 1)
            ctx.fail(f"No such command {args[0]!r}." + (f" Did you mean {near[0]!r}?" if near else ""))
        return super().resolve_command(ctx, args)


class Noun(_Helped, click.Group):
    """A group such as ``tinkex checkpoint``; its commands take the common options."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.command_class = Leaf

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Every command, in the order they are written in."""
        del ctx
        return list(self.commands)


class Leaf(_Helped, click.Command):
    """A command that also takes ``--json``, ``--quiet`` and the options that say which server is meant."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        taken = {option for parameter in self.params for option in parameter.opts}
        self.params += [option for option in common_options() if not taken & set(option.opts)]


def common_options() -> list[click.Option]:
    """The options every command takes, before or after its name."""
    return [
        click.Option(["--base-url"], metavar="URL", callback=_kept("base_url"), expose_value=False,
                     help="Server to talk to, or 'local' for the engine in this process. "
                     "Default: $TINKER_BASE_URL, or the hosted service."),
        click.Option(["--local"], is_flag=True, callback=_local, expose_value=False,
                     help="Short for --base-url local: no server, no key."),
        click.Option(["--api-key"], metavar="KEY", callback=_kept("api_key"), expose_value=False,
                     help="Default: $TINKER_API_KEY, or what 'tinkex auth login' stored."),
        click.Option(["--json", "as_json"], is_flag=True, callback=_flag("as_json"), expose_value=False,
                     help="Print JSON, and nothing else, on stdout."),
        click.Option(["--quiet", "-q"], is_flag=True, callback=_flag("quiet"), expose_value=False,
                     help="No progress and no remarks on stderr; errors still."),
    ]  # fmt: skip


def _kept(name: str) -> Callable[[click.Context, click.Parameter, Any], None]:
    def keep(ctx: click.Context, _parameter: click.Parameter, value: Any) -> None:
        if value is not None:
            setattr(ctx.ensure_object(Invocation), name, value)

    return keep


def _flag(name: str) -> Callable[[click.Context, click.Parameter, Any], None]:
    def keep(ctx: click.Context, _parameter: click.Parameter, value: Any) -> None:
        if value:
            setattr(ctx.ensure_object(Invocation), name, True)

    return keep


def _local(ctx: click.Context, _parameter: click.Parameter, value: Any) -> None:
    if value:
        ctx.ensure_object(Invocation).base_url = "local"
