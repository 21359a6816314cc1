"""A command on a terminal of its own that a test types into."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

PATIENCE_S = 120
CONTROL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C reaches the command
os.execv(sys.executable, [sys.executable, "-m", "tinkex", *sys.argv[1:]])
"""


class Terminal:
    """What a command shows, and the keys it gets."""

    def __init__(self, process: subprocess.Popen[bytes], master: int) -> None:
        self.process = process
        self._master = master
        self.shown = ""
        self._seen = 0

    def type(self, text: str) -> None:
        """Types a text as it is; ``\\n`` is Enter, ``\\x03`` Ctrl-C, ``\\x04`` Ctrl-D.

        Wait for the prompt before Ctrl-D: typed earlier, it becomes a NUL when the prompt switches the terminal to raw mode.
        """
        os.write(self._master, text.encode())

    def wait_for(self, text: str) -> str:
        """Waits until a text appears after what was waited for last; returns what was shown up to its end."""
        deadline = time.monotonic() + PATIENCE_S
        while (place := self.shown.find(text, self._seen)) < 0:
            assert time.monotonic() < deadline, f"no {text!r} in {self.shown!r}"
            assert self.read(), f"the command ended without {text!r}: {self.shown!r}"
        start, self._seen = self._seen, place + len(text)
        return self.shown[start : self._seen]

    def wait_for_more(self, num_characters: int) -> None:
        """Waits until that much is shown after what was waited for last."""
        deadline = time.monotonic() + PATIENCE_S
        while len(self.shown) < self._seen + num_characters:
            assert time.monotonic() < deadline, self.shown
            assert self.read(), self.shown

    def wait(self) -> int:
        """Waits for the command to end; returns its exit code."""
        deadline = time.monotonic() + PATIENCE_S
        while self.read():
            assert time.monotonic() < deadline, f"the command does not end: {self.shown!r}"
        return self.process.wait(PATIENCE_S)

    def read(self) -> bool:
        """Reads what is shown now, if anything; returns whether the command runs."""
        ready, _, _ = select.select([self._master], [], [], 0.2)
        if not ready:
            return True
        try:
            chunk = os.read(self._master, 65536)
        except OSError:  # the command has ended
            return False
        self.shown += chunk.decode(errors="replace")
        return bool(chunk)


@contextmanager
def on_terminal(*arguments: str, env: Mapping[str, str], cwd: Path, term: str = "dumb") -> Iterator[Terminal]:
    """Runs ``tinkex`` with a terminal as its only stream, which it controls."""
    master, child = pty.openpty()
    hidden = {k: v for k, v in os.environ.items() if not k.startswith(("TINKER_", "TINKEX_"))}
    process = subprocess.Popen(
        [sys.executable, "-c", CONTROL, *arguments],
        stdin=child,
        stdout=child,
        stderr=child,
        cwd=cwd,
        start_new_session=True,
        env={**hidden, "TINKER_TELEMETRY": "0", "TERM": term, "COLUMNS": "100", "LINES": "40", **env},
    )
    os.close(child)
    try:
        yield Terminal(process, master)
    finally:
        process.kill()
        process.wait()
        os.close(master)
