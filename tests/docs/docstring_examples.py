"""Runs the examples in all docstrings: ``python -m tests.docs.docstring_examples``.

Those under ``Example:`` need a server or a model, and are not run.
"""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
import sys
import warnings

import tinkex

ILLUSTRATIVE = re.compile(r"^\s*Example:\s*$", re.MULTILINE)
NOT_IMPORTED = re.compile(r"\.(__main__|_core|worker_main)$")
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def main() -> int:
    warnings.simplefilter("ignore", DeprecationWarning)  # of names that moved, which are modules too
    num_run, failures = 0, list[str]()
    for module in pkgutil.walk_packages(tinkex.__path__, "tinkex."):
        if NOT_IMPORTED.search(module.name):
            continue
        for example in doctest.DocTestFinder().find(importlib.import_module(module.name), module.name):
            if example.examples and not ILLUSTRATIVE.search(example.docstring or ""):
                doctest.DocTestRunner(verbose=False, optionflags=FLAGS).run(example, out=failures.append)
                num_run += 1
    print(*failures, f"{num_run} docstrings", sep="")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
