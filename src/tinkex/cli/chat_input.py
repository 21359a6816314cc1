"""The lines that a user types or pipes into a chat."""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib import import_module

import click

from tinkex.errors import SetupError

__all__ = ["ChatInput"]

PROMPT = "> "


class ChatInput:
    """Reads messages: from a terminal with line editing and the lines typed before, else one per line."""

    def __init__(self) -> None:
        self.is_terminal = sys.stdin.isatty()
        """Whether a prompt is shown; Ctrl-C then ends an answer and not the program."""
        if self.is_terminal:
            with suppress(ModuleNotFoundError):  # a Python without it has no line editing
                import_module("readline")  # input() uses it from now on

    def read(self) -> str | None:
        """Returns the next message, or None at the end; of a terminal, lines that end with a backslash are one with the next."""
        if not self.is_terminal:
            return self._read_piped()
        lines: list[str] = []
        while True:
            try:
                line = self._read_typed("  " if lines else PROMPT)
            except EOFError:
                click.echo(err=True)
                return "\n".join(lines) if lines else None
            if not line.endswith("\\"):
                return "\n".join([*lines, line])
            lines.append(line.removesuffix("\\"))

    def _read_typed(self, prompt: str) -> str:
        if not sys.stdout.isatty():  # the answers go elsewhere, the prompt must not
            click.echo(prompt, nl=False, err=True)
            prompt = ""
        while True:
            try:
                line = input(prompt)
                line.encode()
            except UnicodeError:
                click.echo("that line is not valid UTF-8; type it again", err=True)
                continue
            return line

    def _read_piped(self) -> str | None:
        line = sys.stdin.buffer.readline()
        try:
            return line.decode("utf-8").rstrip("\r\n") if line else None
        except UnicodeDecodeError as error:
            raise SetupError(f"stdin is not valid UTF-8 ({error})") from error
