from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_examples_in_docstrings_give_what_they_show() -> None:
    """In a process of its own: some attach sinks to the whole process."""
    command = [sys.executable, "-m", "tests.docs.docstring_examples"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    found = re.search(r"(\d+) docstrings$", done.stdout.strip())
    assert found is not None
    assert int(found[1]) > 300, "nearly all of them are found"
