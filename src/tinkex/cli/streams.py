"""Standard streams: closed pipes, missing streams and characters that cannot be encoded cause no traceback."""

from __future__ import annotations

import os
import sys
from io import TextIOWrapper

import click

from tinkex.errors import SetupError

__all__ = ["confirm", "flush_streams", "read_input", "set_up_streams"]


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
    """Asks a yes/no question on stderr; returns False at the end of the input."""
    try:
        return click.confirm(question, err=True)
    except click.Abort as aborted:
        if isinstance(aborted.__cause__, KeyboardInterrupt) or isinstance(
            aborted.__context__, KeyboardInterrupt
        ):
            raise
        click.echo(err=True)
        return False


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
