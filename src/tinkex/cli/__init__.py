"""The ``tinkex`` command: one file per noun, each loaded when it is used."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module

import click

from tinkex._version import __version__
from tinkex.errors import TinkexError

COMMANDS: Mapping[str, str] = {"serve": "tinkex.cli.serve:serve", "version": "tinkex.cli.version:version"}
"""Command → where it lives."""


class LazyGroup(click.Group):
    """A group whose commands are imported when they are named, so that help stays quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Every command, in the order of the table."""
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """One command, imported now."""
        del ctx
        place = COMMANDS.get(cmd_name)
        if place is None:
            return None
        module, _, attribute = place.partition(":")
        command = getattr(import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="tinkex", message="%(prog)s %(version)s")
def tinkex() -> None:
    """Train and sample language models with the Tinker API, on your own machine or anywhere.

    \b
    Examples:
      tinkex serve
      tinkex serve --model Qwen/Qwen3-8B=./my-model --port 9000
    """  # noqa: D301 -- click reads the escape as "keep these lines"


def main() -> None:
    """Run the command line; errors are one line on stderr and exit code 1, wrong usage exits with 2."""
    try:
        tinkex(prog_name="tinkex", standalone_mode=False)
    except click.Abort:
        click.echo("Aborted.", err=True)
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except TinkexError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(1)
