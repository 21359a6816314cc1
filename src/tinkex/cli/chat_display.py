"""How answers of a chat are shown: as they grow, side by side, or as JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import click

from tinkex.cli.streams import printable, write_text

if TYPE_CHECKING:
    from tinkex.cli.chat_session import Answer
    from tinkex.cli.invocation import Invocation

__all__ = ["ChatDisplay", "display_for"]

REFRESH_S = 0.05
"""How often two columns are drawn again."""


class ChatDisplay(Protocol):
    """Shows the answers to one message."""

    def add(self, answer: Answer, text: str) -> None:
        """Shows more text of an answer, which contains it already."""
        ...


@contextmanager
def display_for(invocation: Invocation, answers: Sequence[Answer]) -> Iterator[ChatDisplay]:
    """The display for these answers; what it has is complete when the block ends, also after an error or Ctrl-C."""
    if invocation.as_json:
        yield _Silent()
        for answer in answers:
            click.echo(json.dumps(answer.as_json(), ensure_ascii=False))
    elif len(answers) == 1:
        try:
            yield _Stream()
        finally:
            if answers[0].text or answers[0].stop_reason is not None:
                click.echo()
    elif sys.stdout.isatty():
        with _columns(answers) as display:
            yield display
    else:
        yield _Silent()
        write_text("\n\n".join(f"{answer.model}:\n{answer.text}" for answer in answers))


class _Silent:
    """Shows nothing before the end."""

    def add(self, answer: Answer, text: str) -> None:
        """Does nothing."""


class _Stream:
    """Prints text as it arrives."""

    def add(self, answer: Answer, text: str) -> None:
        """Prints the text."""
        del answer
        write_text(text, end="")


@contextmanager
def _columns(answers: Sequence[Answer]) -> Iterator[ChatDisplay]:
    """Two columns that grow; while they are taller than the terminal, the end is cut off, and shown when they are complete."""
    from rich.console import Console
    from rich.live import Live

    console = Console(emoji=False, markup=False, highlight=False)
    with Live(_table(answers), console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as live:  # fmt: skip
        display = _Columns(live, answers)
        try:
            yield display
        finally:
            live.update(_table(answers), refresh=True)


class _Columns:
    def __init__(self, live: Any, answers: Sequence[Answer]) -> None:
        self._live = live
        self._answers = answers
        self._drawn = 0.0

    def add(self, answer: Answer, text: str) -> None:
        """Draws the columns again, unless that was done just now."""
        del answer, text
        now = time.monotonic()
        if now - self._drawn >= REFRESH_S:
            self._drawn = now
            self._live.update(_table(self._answers), refresh=True)


def _table(answers: Sequence[Answer]) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False, expand=True)
    for answer in answers:
        table.add_column(answer.model, ratio=1, overflow="fold")
    table.add_row(*(Text(printable(answer.text)) for answer in answers))
    return table
