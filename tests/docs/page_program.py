"""Runs the Python blocks of a page in request in one session.

``python tests/docs/page_program.py PAGE`` runs one page; tracebacks name the page and the line in it. Without a page it
reads requests, one JSON line each, and runs every page in a forked child that has the heavy packages loaded, because
importing them is most of the cost of a page.
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
"""Importing these starts no thread, so the process can be forked."""


def run(page: Path) -> None:
    text = page.read_text()
    namespace = {"__name__": "__main__"}
    for match in BLOCK.finditer(text):
        before = text.count("\n", 0, match.start(1))
        exec(compile("\n" * before + match[1], str(page), "exec"), namespace)


def serve_requests() -> None:
    for name in HEAVY:
        importlib.import_module(name)
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            # Returns, so that exit handlers run as in any program.
            output = os.open(request["output"], os.O_WRONLY | os.O_CREAT)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.chdir(request["directory"])
            os.environ.update(request["environment"])
            run(Path(request["page"]))
            return
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    run(Path(sys.argv[1])) if sys.argv[1:] else serve_requests()
