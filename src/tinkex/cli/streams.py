"""The streams of the process: output that cannot be shown or taken, and input that cannot be read, end in no trace."""

from __future__ import annotations

import os
import sys
from io import TextIOWrapper

import click

from tinkex.errors import SetupError

__all__ = ["confirmed", "prepare_streams", "read_input", "settle_streams"]


def prepare_streams() -> None:
    """Has letters that a terminal cannot show replaced by others; an input that was closed is one at its end."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115, PTH123 -- it is there as long as the process
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")


def read_input() -> str | None:
    """All of stdin, as UTF-8 whatever the locale says; None where there is a terminal."""
    if sys.stdin.isatty():
        return None
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise SetupError(f"the input cannot be read as text ({error})") from error


def confirmed(question: str) -> bool:
    """Asks on stderr; the end of the input is a no."""
    try:
        return click.confirm(question, err=True)
    except click.Abort as aborted:
        if isinstance(aborted.__cause__, KeyboardInterrupt) or isinstance(
            aborted.__context__, KeyboardInterrupt
        ):
            raise
        click.echo(err=True)
        return False


def settle_streams() -> None:
    """Leaves nothing for the end of the interpreter to fail at, or to talk about."""
    for stream in (sys.stdout, sys.stderr):
        if stream is None:  # closed by whoever started us
            continue
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    # The result is out. Engines that are closed under their last calls, and modules that are taken down in no order
    # that their authors thought of, have no news for anybody.
    sys.unraisablehook = lambda _: None
    if "logging" in sys.modules:
        sys.modules["logging"].disable()
