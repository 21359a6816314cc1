"""Runs a program that uses the official client, in a process whose exit status is the program's.

The official client leaves a daemon thread with an event loop running. An interpreter that exits ends such a thread as soon as it takes
the GIL, and if compiled code that called Python is on its stack (pydantic's validators, torch), the whole process is aborted, after
the program has succeeded. A program that is started through this file therefore ends without finalizing the interpreter.
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

__all__ = ["official_command"]


def official_command(*arguments: str) -> list[str]:
    """The command line of ``python *arguments``: ``-c CODE …``, ``-m MODULE …`` or ``FILE …``.

    >>> official_command("-m", "tinker.cli", "version")[2:]
    ['-m', 'tinker.cli', 'version']
    """
    return [sys.executable, str(Path(__file__)), *arguments]


def run_program(arguments: Sequence[str]) -> None:
    """Runs what ``python *arguments`` would, in this process."""
    first, *others = arguments
    if first == "-c":
        sys.argv, sys.path[0] = ["-c", *others[1:]], ""
        exec(compile(others[0], "<string>", "exec"), {"__name__": "__main__"})
    elif first == "-m":
        sys.argv, sys.path[0] = others, str(Path.cwd())
        runpy.run_module(others[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = [first, *others], str(Path(first).parent)
        runpy.run_path(first, run_name="__main__")


def main() -> None:
    """Runs the program and ends as it does."""
    status = 0
    try:
        run_program(sys.argv[1:])
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 -- as the interpreter does
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
