"""Runs the Python blocks of a page one after another, as a reader who pastes them into one session would.

``python tests/docs/page_program.py PAGE`` runs one; a traceback names the page and the line in it. Without a page it takes
orders, one JSON line each, and runs every page in a child of its own that is born with the heavy packages loaded, which is
most of what a page costs.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from pathlib import Path

BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
HEAVY = (
    "torch",
    "transformers.modeling_utils",
    "transformers.models.auto.tokenization_auto",
    "tinkex.engine.api.embedded",
    "tinkex.engine.sampler.sampler",
    "tinkex.engine.trainer",
    "tinkex.testing",
)
"""Loading these starts no thread and computes nothing, so a process that has them can be forked."""


def run(page: Path) -> None:
    text = page.read_text()
    namespace = {"__name__": "__main__"}
    for match in BLOCK.finditer(text):
        before = text.count("\n", 0, match.start(1))
        exec(compile("\n" * before + match[1], str(page), "exec"), namespace)


def take_orders() -> None:
    for name in HEAVY:
        importlib.import_module(name)
    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if child == 0:
            # Ends like any program: what is registered for the end of the interpreter runs.
            output = os.open(order["output"], os.O_WRONLY | os.O_CREAT)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.chdir(order["directory"])
            os.environ.update(order["environment"])
            run(Path(order["page"]))
            return
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    run(Path(sys.argv[1])) if sys.argv[1:] else take_orders()
