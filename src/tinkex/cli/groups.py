"""Click groups and commands with lazy loading and the options common to all ``tinkex`` commands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import click

from tinkex.cli.invocation import Invocation

__all__ = ["EXIT_CODES", "CommandGroup", "LazyGroup", "Leaf"]

EXIT_CODES = "Exit codes: 0 success, 1 failure (also if only some of several items failed), 2 usage error, 130 interrupted."

SERVER_OPTIONS = frozenset({"--base-url", "--local", "--api-key", "--timeout"})

HELP_NAMES = ["-h", "--help"]


class _ShortHelp(click.Command):
    """Accepts -h in every context (click caches the help option made for the first one), and shows help without arguments."""

    def get_help_option_names(self, ctx: click.Context) -> list[str]:
        """Returns the same names for every context."""
        del ctx
        return list(HELP_NAMES)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Prints the help of a group that is called without a command; newer releases of click make that an error."""
        if not args and self.no_args_is_help and not ctx.resilient_parsing:
            click.echo(ctx.get_help(), color=ctx.color)
            ctx.exit()
        return super().parse_args(ctx, args)


class LazyGroup(_ShortHelp, click.Group):
    """A group that imports a command when it is used, which keeps help fast."""

    def __init__(self, *args: Any, locations: Mapping[str, str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._locations = locations

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Returns every command name, in table order."""
        del ctx
        return list(self._locations)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports a command and returns it."""
        del ctx
        location = self._locations.get(cmd_name)
        if location is None:
            return None
        module, _, attribute = location.partition(":")
        command = getattr(import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Returns the named command; the error for an unknown name suggests the closest one."""
        if args and args[0] not in self._locations and not ctx.resilient_parsing:
            from difflib import get_close_matches

            near = get_close_matches(args[0], self._locations, 1)
            ctx.fail(f"No such command {args[0]!r}." + (f" Did you mean {near[0]!r}?" if near else ""))
        return super().resolve_command(ctx, args)


class CommandGroup(_ShortHelp, click.Group):
    """A group such as ``tinkex checkpoint``; it takes the common options, and so do its commands, whose help shows them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.command_class = Leaf
        for option in common_options():
            option.hidden = not self.invoke_without_command
            self.params.append(option)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Returns every command name, in definition order."""
        del ctx
        return list(self.commands)


class Leaf(_ShortHelp, click.Command):
    """A command that also takes ``--format``, ``--quiet`` and the options that select the server.

    ``uses_server=False`` hides the latter in the help.
    """

    def __init__(self, *args: Any, uses_server: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        taken = {option for parameter in self.params for option in parameter.opts}
        self.params += [option for option in common_options() if not taken & set(option.opts)]
        if not uses_server:  # accepted, since they may stand before the name of any command
            for parameter in self.params:
                if isinstance(parameter, click.Option) and set(parameter.opts) & SERVER_OPTIONS:
                    parameter.hidden = True


def common_options() -> list[click.Option]:
    """Returns the options that every command takes, before or after its name.

    They are parsed first, since short names of checkpoints are looked up on the server.
    """
    return [
        click.Option(["--base-url"], is_eager=True, metavar="URL", callback=_store("base_url"), expose_value=False,
                     help="Server URL, or 'local' for the engine in this process. "
                     "Default: $TINKER_BASE_URL, or the hosted service."),
        click.Option(["--local"], is_eager=True, is_flag=True, callback=_local, expose_value=False,
                     help="Short for --base-url local: no server, no key."),
        click.Option(["--api-key"], is_eager=True, metavar="KEY", callback=_store("api_key"), expose_value=False,
                     help="API key. Default: $TINKER_API_KEY, or the key stored by 'tinkex auth login'."),
        click.Option(["--timeout"], is_eager=True, type=click.FloatRange(min=0, min_open=True), metavar="SECONDS",
                     callback=_store("timeout"), expose_value=False,
                     help="Seconds to wait for a reply. Default: $TINKEX_TIMEOUT, or 60 per request and no limit "
                     "for results."),
        click.Option(["-f", "--format"], is_eager=True, type=click.Choice(["table", "json"]), callback=_format,
                     expose_value=False, help="Output format. Default: table."),
        click.Option(["--json", "as_json"], is_eager=True, is_flag=True, callback=_flag("as_json"), expose_value=False,
                     help="Short for --format json: print only JSON on stdout."),
        click.Option(["--quiet", "-q"], is_eager=True, is_flag=True, callback=_flag("quiet"), expose_value=False,
                     help="Print only errors on stderr, no progress or notes."),
    ]  # fmt: skip


def _store(name: str) -> Callable[[click.Context, click.Parameter, Any], None]:
    def callback(ctx: click.Context, _parameter: click.Parameter, value: Any) -> None:
        if value is not None:
            setattr(ctx.ensure_object(Invocation), name, value)

    return callback


def _flag(name: str) -> Callable[[click.Context, click.Parameter, Any], None]:
    def callback(ctx: click.Context, _parameter: click.Parameter, value: Any) -> None:
        if value:
            setattr(ctx.ensure_object(Invocation), name, True)

    return callback


def _format(ctx: click.Context, _parameter: click.Parameter, value: Any) -> None:
    if value is not None:
        ctx.ensure_object(Invocation).as_json = value == "json"


def _local(ctx: click.Context, _parameter: click.Parameter, value: Any) -> None:
    if value:
        ctx.ensure_object(Invocation).base_url = "local"
