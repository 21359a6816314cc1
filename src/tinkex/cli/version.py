"""``tinkex version``."""

from __future__ import annotations

import click

from tinkex._version import __version__


@click.command()
def version() -> None:
    """Print the version.

    \b
    Example:
      tinkex version
    """  # noqa: D301 -- click reads the escape as "keep these lines"
    click.echo(f"tinkex {__version__}")
