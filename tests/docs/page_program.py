"""Runs the Python blocks of a page one after another, as a reader who pastes them into one session would.

Usage: python tests/docs/page_program.py PAGE. A traceback names the page and the line in it.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def run(page: Path) -> None:
    text = page.read_text()
    namespace = {"__name__": "__main__"}
    for match in BLOCK.finditer(text):
        before = text.count("\n", 0, match.start(1))
        exec(compile("\n" * before + match[1], str(page), "exec"), namespace)


if __name__ == "__main__":
    run(Path(sys.argv[1]))
