"""What the test suite itself must keep to."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_children_of_a_suite_in_the_background_can_be_interrupted() -> None:
    """A shell starts background jobs with SIGINT ignored, and children would inherit that."""
    child = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    suite = f"import subprocess, sys, tests.conftest; subprocess.run([sys.executable, '-c', {child!r}])"
    done = subprocess.run(
        ["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, "-c", suite],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "True\n"
