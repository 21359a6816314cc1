"""The progress of loading a model, on stderr: a line that updates on a terminal, one line per phase elsewhere."""

from __future__ import annotations

import threading
from typing import TextIO

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


class LoadingLine:
    """Shows the progress of slow set-up work; thread-safe.

    >>> import sys
    >>> line = LoadingLine(sys.stdout)
    >>> line.show("downloading", 1 * MEBIBYTE, 98 * MEBIBYTE)
    downloading
    >>> line.show("downloading", 2 * MEBIBYTE, 98 * MEBIBYTE)
    >>> line.clear()
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self._phase = ""
        self._live = stream.isatty()

    def show(self, phase: str, done_bytes: int, total_bytes: int | None) -> None:
        """Shows the current phase and its progress; an empty phase clears the line."""
        if not phase:
            self.clear()
            return
        if _quiet.is_set():
            return
        with self._lock:
            if self._live:
                self._stream.write(f"\r\x1b[2K{phase}{_amount(done_bytes, total_bytes)}")
            elif phase != self._phase:
                self._stream.write(f"{phase}\n")
            self._phase = phase
            self._stream.flush()

    def clear(self) -> None:
        """Clears the line."""
        with self._lock:
            if self._live and self._phase:
                self._stream.write("\r\x1b[2K")
                self._stream.flush()
            self._phase = ""


def _amount(done: int, total: int | None) -> str:
    if total:
        filled = round(20 * done / total)
        bar = "━" * filled + "╌" * (20 - filled)
        return f"  {bar} {done / MEBIBYTE:.0f} of {total / MEBIBYTE:.0f} MB"
    return f"  {done / MEBIBYTE:.0f} MB" if done else ""
