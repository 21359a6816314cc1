"""Standard streams: closed pipes, missing streams and characters that cannot be encoded cause no traceback."""

from __future__ import annotations

import os
import re
import sys
from io import TextIOWrapper

import click

from tinkex.errors import SetupError

__all__ = ["confirm", "flush_streams", "printable", "read_input", "set_up_streams", "write_text"]

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters except tab and newline."""


def set_up_streams() -> None:
    """Replaces characters that the output cannot encode; a closed stdin becomes an empty one."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115, PTH123 -- open for the life of the process
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")


def read_input() -> str | None:
    """Returns all of stdin as UTF-8 regardless of the locale, or None if it is a terminal."""
    if sys.stdin.isatty():
        return None
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise SetupError(f"stdin is not valid UTF-8 ({error})") from error


def confirm(question: str) -> bool:
    """Asks a yes/no question on stderr; raises :class:`SetupError` if the input ends without an answer."""
    try:
        return click.confirm(question, err=True)
    except click.Abort as aborted:
        if isinstance(aborted.__cause__, KeyboardInterrupt) or isinstance(
            aborted.__context__, KeyboardInterrupt
        ):
            raise
        click.echo(err=True)
        raise SetupError(
            "nothing was changed: the question was not answered. Answer y or n, or add --yes to do it without a question"
        ) from None


def printable(text: str, *, is_terminal: bool | None = None) -> str:
    r"""Escapes control characters for a terminal, which would execute them; other outputs get the text unchanged.

    >>> printable("\x1b[2Jgone\n", is_terminal=True)
    '\\x1b[2Jgone\n'
    """
    if is_terminal is None:
        is_terminal = sys.stdout.isatty()
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text) if is_terminal else text


def write_text(text: str, *, end: str = "\n") -> None:
    """Prints text of a model on stdout: escaped on a terminal, unchanged elsewhere."""
    # With color, click leaves out no escape sequences where the output is not a terminal.
    click.echo(printable(text) + end, nl=False, color=True)


def flush_streams() -> None:
    """Flushes the output and silences errors during the interpreter's shutdown."""
    for stream in (sys.stdout, sys.stderr):
        if stream is None:  # closed by the parent process
            continue
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    # The result is written. What fails afterwards, while the interpreter tears down modules and engines, is noise.
    sys.unraisablehook = lambda _: None
    if "logging" in sys.modules:
        sys.modules["logging"].disable()
