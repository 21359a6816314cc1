"""Bars on a terminal, while something else writes to it."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

PROGRAM = """
import sys
from tinkex.cli.invocation import Invocation
from tinkex.cli.progress import count_bar, transfer_bar

with transfer_bar(Invocation(), "archive") as update:
    update("archive", 1, 2)
    sys.stderr.write("\\r\\x1b[2Kloading a model")
with count_bar(Invocation(), "task", 2) as advance:
    advance()
    sys.stderr.write("\\r\\x1b[2Kloading another")
"""


@pytest.mark.slow
def test_a_loading_line_beside_a_bar_keeps_its_escape_sequences() -> None:
    terminal, child = pty.openpty()
    subprocess.run(
        [sys.executable, "-c", PROGRAM],
        stdout=child,
        stderr=child,
        check=True,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    )
    os.close(child)
    shown = os.read(terminal, 65536).decode()
    os.close(terminal)
    assert "\r\x1b[2Kloading a model" in shown
    assert "\r\x1b[2Kloading another" in shown
