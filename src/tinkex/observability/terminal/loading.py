"""The progress of work without steps, on stderr: a line that updates on a terminal, one line per phase elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TextIO

from tinkex.observability.terminal.live import CLEAR, fitted, is_live

MEBIBYTE = 1024 * 1024

_quiet = threading.Event()


def set_quiet(quiet: bool = True) -> None:
    """Suppresses every loading line of this process, for commands with ``--quiet``.

    >>> import sys
    >>> set_quiet()
    >>> LoadingLine(sys.stdout).show("loading", 0, None)
    >>> set_quiet(quiet=False)
    """
    if quiet:
        _quiet.set()
    else:
        _quiet.clear()


def is_quiet() -> bool:
    """Returns whether loading lines are suppressed.

    >>> is_quiet()
    False
    """
    return _quiet.is_set()


def megabytes(done: int, total: int | None) -> str:
    """Formats bytes: a bar if the total is known.

    >>> megabytes(98 * MEBIBYTE, None)
    '98 MB'
    """
    if total:
        filled = round(20 * done / total)
        bar = "━" * filled + "╌" * (20 - filled)
        return f"{bar} {done / MEBIBYTE:.0f} of {total / MEBIBYTE:.0f} MB"
    return f"{done / MEBIBYTE:.0f} MB" if done else ""


def counts(done: int, total: int | None) -> str:
    """Formats a number of items; a single item has no progress.

    >>> counts(3, 12), counts(0, 1)
    ('3/12', '')
    """
    return f"{done}/{total}" if total and total > 1 else ""


class LoadingLine:
    """Shows the progress of slow work; thread-safe.

    >>> import sys
    >>> line = LoadingLine(sys.stdout)
    >>> line.show("downloading", 1 * MEBIBYTE, 98 * MEBIBYTE)
    downloading
    >>> line.show("downloading", 2 * MEBIBYTE, 98 * MEBIBYTE)
    >>> line.clear()
    """

    def __init__(self, stream: TextIO, amount: Callable[[int, int | None], str] = megabytes) -> None:
        self._stream = stream
        self._amount = amount
        self._lock = threading.Lock()
        self._phase = ""
        self._live = is_live(stream)

    def show(self, phase: str, done: int, total: int | None) -> None:
        """Shows the current phase and its progress; an empty phase clears the line."""
        if not phase:
            self.clear()
            return
        if is_quiet():
            return
        with self._lock:
            if self._live:
                line = f"{phase}  {self._amount(done, total)}".rstrip(" ")
                self._stream.write(CLEAR + fitted(line, self._stream))
            elif phase != self._phase:
                self._stream.write(f"{phase}\n")
            self._phase = phase
            self._stream.flush()

    def clear(self) -> None:
        """Clears the line."""
        with self._lock:
            if self._live and self._phase:
                self._stream.write(CLEAR)
                self._stream.flush()
            self._phase = ""
