"""A window of Chromium that a test drives step by step."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.browser.chromium import FLAGS, playwright


class Window:
    """Sends orders to ``drive_pages.py``; :meth:`open` starts with a new window and no cookies.

    Its commands are methods of ``Driver``: ``goto``, ``click``, ``press``, ``until``…
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def open(self, width: int = 1280, height: int = 900, scheme: str = "light") -> Window:
        self("window", width, height, scheme)
        return self

    def __call__(self, command: str, *arguments: object) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([command, *arguments]) + "\n")
        self._process.stdin.flush()
        state, result = json.loads(self._process.stdout.readline())
        assert state == "done", f"{command} {arguments}: {result}"
        return result


@contextmanager
def open_window(executable: str) -> Iterator[Window]:
    """Starts a browser; it ends with the block."""
    process = subprocess.Popen(
        [playwright(), str(Path(__file__).with_name("drive_pages.py")), executable, *FLAGS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        yield Window(process)
        assert process.stdin is not None
        process.stdin.close()
        process.wait(60)
    assert process.returncode == 0
