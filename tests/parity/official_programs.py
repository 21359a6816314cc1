"""Runs the programs of a generation with the official package on the path, in a process of its own; prints what they found."""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

GENERATIONS = Path(__file__).parents[1] / "contract" / "generations"
PACKAGE = "tests.contract.generations"


def load(name: str) -> ModuleType:
    """A module of the programs, whose imports of our package are those of the official one."""
    source = (GENERATIONS / f"{name}.py").read_text("utf-8")
    for ours, theirs in (
        ("import tinkex as tinker", "import tinker"),
        ("from tinkex import", "from tinker import"),
    ):
        source = source.replace(ours, theirs)
    assert "tinkex" not in source.partition('"""\n')[2], name
    module = sys.modules[f"{PACKAGE}.{name}"] = ModuleType(f"{PACKAGE}.{name}")
    exec(compile(source, str(GENERATIONS / f"{name}.py"), "exec"), module.__dict__)
    return module


def main(style: str, url: str, key: str) -> None:
    """Runs every program of a module; each has a session of its own."""
    import tinker

    warnings.simplefilter("ignore")
    load("common")
    programs = load(style)
    found: dict[str, Any] = {}
    for name, program in list(vars(programs).items()):
        if inspect.isfunction(program) and program.__module__ == programs.__name__:
            service = tinker.ServiceClient(base_url=url, api_key=key)
            try:
                returned = program(service)
                found[name] = asyncio.run(returned) if inspect.iscoroutine(returned) else returned
            except Exception as error:  # noqa: BLE001 -- it is the finding
                found[name] = f"{type(error).__name__}: {error}"
            service.close("success").result()
    print(json.dumps({"version": tinker.__version__, "found": found}))


if __name__ == "__main__":
    main(*sys.argv[1:])
