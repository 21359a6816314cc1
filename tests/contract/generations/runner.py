"""Runs programs of either generation on a backend, also from another process; ``python -m`` it to run all of one style."""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import tinkex
from tests.contract.generations import programs_036, programs_039
from tests.contract.generations.common import BASE_MODEL

__all__ = ["NAMES", "NOT_ON_A_LOOP", "STYLES", "connect", "run", "run_all", "run_on_loop"]

STYLES = {"0.36": programs_036, "0.39": programs_039}
NAMES = [
    name for name, program in vars(programs_036).items()
    if inspect.isfunction(program) and program.__module__ == programs_036.__name__
]  # fmt: skip

NOT_ON_A_LOOP = {
    "mixed": "asyncio.run() cannot be called where a loop runs",
    "rejected": "where a loop runs, errors are raised at the first use, and in the style of 0.36 there is none",
}


def run(style: str, name: str, service: tinkex.ServiceClient) -> Any:
    """Runs one program; its result is plain data."""
    program = getattr(STYLES[style], name)
    found = asyncio.run(program(service)) if inspect.iscoroutinefunction(program) else program(service)
    return json.loads(json.dumps(found))


def connect(backend: str, where: str, key: str) -> tinkex.ServiceClient:
    """A client of a backend in this process; ``where`` is the server's address, or the directory of the model."""
    if backend == "mock":
        from tests.contract.mock_service import MockService
        from tinkex.testing import MockTransport

        return tinkex.ServiceClient(
            base_url="http://mock", api_key="tml-mock", transport=MockTransport(MockService())
        )
    if backend == "embedded":
        from tinkex._transport.local import LocalTransport

        home, model = where.split(",")
        return tinkex.ServiceClient(
            base_url="local", transport=LocalTransport(Path(home), {BASE_MODEL: model})
        )
    return tinkex.ServiceClient(base_url=where, api_key=key)


def run_all(style: str, backend: str, where: str, key: str) -> dict[str, Any]:
    """Runs all programs of a style, for a process that is started with ``spawn``."""
    warnings.simplefilter("error")
    with connect(backend, where, key) as service:
        return {name: run(style, name, service) for name in NAMES}


async def run_on_loop(style: str, service: tinkex.ServiceClient) -> dict[str, Any]:
    """Runs the programs of a style on the running event loop, as the cells of a notebook do, those of synchronous style too."""
    found = {}
    for name in NAMES:
        if name not in NOT_ON_A_LOOP:
            returned = getattr(STYLES[style], name)(service)
            found[name] = json.loads(
                json.dumps(await returned if inspect.isawaitable(returned) else returned)
            )
    return found


if __name__ == "__main__":
    print(json.dumps(run_all(*sys.argv[1:])))
