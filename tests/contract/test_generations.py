"""Twenty programs in the styles of 0.36 and 0.39: in this process, in a spawned one, in a notebook."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import tinkex
from tests.contract.backends import ALL, BASE_MODEL, FIXTURES, Backend
from tests.contract.generations.common import GREEDY, prompt, tokens_of
from tests.contract.generations.runner import NAMES, NOT_ON_A_LOOP, STYLES, run, run_all
from tests.servers import ServedEngine

ROOT = Path(__file__).parents[2]
PACKAGES = ("nbclient==0.11.0", "ipykernel==7.4.0")

pytestmark = pytest.mark.slow


def test_there_are_twenty_programs_in_both_styles() -> None:
    assert len(NAMES) == 20
    assert all(hasattr(programs, name) for programs in STYLES.values() for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_program_finds_the_same_in_both_styles(name: str, backend: Backend) -> None:
    found = []
    for style in STYLES:
        with backend.service() as service:
            found.append(run(style, name, service))
    assert found[0] == found[1]
    assert found[0]


def test_all_programs_run_inside_done_callbacks(backend: Backend) -> None:
    found = []
    for style in STYLES:
        with backend.service() as outer, backend.service() as service:
            seen: Future[dict[str, Any]] = Future()

            def callback(
                _: object, style: str = style, service: Any = service, seen: Future[dict[str, Any]] = seen
            ) -> None:
                try:
                    seen.set_result({name: run(style, name, service) for name in NAMES})
                except BaseException as error:  # noqa: BLE001 -- the test raises it
                    seen.set_exception(error)

            sampler = outer.create_sampling_client(base_model=BASE_MODEL)
            sampler.sample(prompt(), 1, GREEDY).add_done_callback(callback)
            found.append(seen.result(timeout=280))
    assert found[0] == found[1]
    assert list(found[0]) == NAMES


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.slow] * (name == "pool")) for name in ALL])
def reached(request: pytest.FixtureRequest, tmp_path: Path, tiny_model: Path) -> tuple[str, str, str]:
    """How another process reaches a backend: its name, where it is, and the key."""
    if request.param in FIXTURES:
        served: ServedEngine = request.getfixturevalue(FIXTURES[request.param])
        return request.param, served.url, served.key
    return request.param, f"{tmp_path},{tiny_model}", ""


def test_all_programs_run_in_a_spawned_process(reached: tuple[str, str, str]) -> None:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        found = [pool.submit(run_all, style, *reached).result(timeout=280) for style in STYLES]
    assert found[0] == found[1]
    assert list(found[0]) == NAMES


def test_a_sampling_client_of_either_style_is_sent_to_a_spawned_process(served_engine: ServedEngine) -> None:
    with tinkex.ServiceClient(base_url=served_engine.url, api_key=served_engine.key) as service:
        used = service.create_sampling_client(base_model=BASE_MODEL)
        result = service.create_sampling_client(base_model=BASE_MODEL).result()
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            drawn = [pool.submit(draw, sampler).result(timeout=120) for sampler in (used, result)]
    assert drawn[0] == drawn[1]


def draw(sampler: Any) -> tuple[str, list[int]]:
    return type(sampler).__name__, tokens_of(sampler.sample(prompt(), 1, GREEDY).result())


# ---- notebooks ----

CELLS = {
    "0.36": [
        "client = service.create_lora_training_client(BASE_MODEL, rank=4, seed=1)",
        'output = client.forward_backward([datum()], "cross_entropy").result()',
        "step = client.optim_step(ADAM).result()",
        "info = client.get_info()\nassert isinstance(info, types.GetInfoResponse)",
        "sampler = client.save_weights_and_get_sampling_client()",
        "drawn = sampler.sample(prompt(), 1, GREEDY).result()",
        "again = await sampler.sample_async(prompt(), 1, GREEDY)",
        "later = await client.forward_backward_async([datum()], 'cross_entropy')\nlater = await later",
    ],
    "0.39": [
        "client = await service.create_lora_training_client(BASE_MODEL, rank=4, seed=1)",
        'output = await client.forward_backward([datum()], "cross_entropy")',
        "step = await client.optim_step(ADAM)",
        "info = await client.get_info()",
        "sampler = await client.save_weights_and_get_sampling_client()",
        "drawn = await sampler.sample(prompt(), 1, GREEDY)",
        "again = sampler.sample(prompt(), 1, GREEDY).result()",
        "later = client.forward_backward([datum()], 'cross_entropy').result()",
    ],
}
FIRST = """import asyncio, json
from tests.contract.generations.common import ADAM, BASE_MODEL, GREEDY, datum, loss_of, prompt, tokens_of
from tests.contract.generations.runner import connect, run_on_loop
from tinkex import types
assert asyncio.get_running_loop(), "cells run on the kernel's event loop"
service = connect({backend!r}, {where!r}, {key!r})
"""
PROGRAMS = "programs = await run_on_loop({style!r}, service)"
LAST = """result = [info.lora_rank, loss_of(output), loss_of(later), tokens_of(drawn), tokens_of(again), type(step).__name__]
service.close("success").result()
print("result", json.dumps({"cells": result, "programs": programs}))
"""
RUN = """import asyncio, json, sys, nbformat
from nbclient import NotebookClient

async def execute(sources):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    await NotebookClient(notebook, timeout=240, kernel_name="python3").async_execute()
    return "".join(output.get("text", "") for output in notebook.cells[-1].outputs)

async def main():
    return await asyncio.gather(*map(execute, json.load(sys.stdin)))

print(json.dumps(asyncio.run(main())))
"""
"""Executes notebooks simultaneously, each in a kernel of its own, and prints what their last cells print."""


@pytest.fixture(scope="session")
def notebook_packages() -> Path:
    """Where nbclient and a kernel are installed, beside the packages of the tests; fetched by pip once."""
    folder = Path(sys.prefix) / "notebook-packages"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run in several processes
        if folder.is_dir():
            return folder
        with tempfile.TemporaryDirectory(dir=sys.prefix) as temporary:
            target = Path(temporary) / "packages"
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(target), *PACKAGES]
            subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
            target.rename(folder)
    return folder


def test_notebooks_of_either_style_find_the_same(
    reached: tuple[str, str, str], notebook_packages: Path, tmp_path: Path
) -> None:
    backend, where, key = reached
    notebooks = [
        [
            FIRST.format(backend=backend, where=place_of_its_own(backend, where, style), key=key),
            *cells,
            PROGRAMS.format(style=style),
            LAST,
        ]
        for style, cells in CELLS.items()
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "src", notebook_packages))),
        "JUPYTER_PLATFORM_DIRS": "1",
        "HOME": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        input=json.dumps(notebooks),
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    printed = json.loads(done.stdout.splitlines()[-1])
    found = [json.loads(last.partition("result ")[2]) for last in printed]
    assert found[0] == found[1]
    assert found[0]["cells"][-1] == "OptimStepResponse"
    assert list(found[0]["programs"]) == [name for name in NAMES if name not in NOT_ON_A_LOOP]


def place_of_its_own(backend: str, where: str, style: str) -> str:
    """Where a notebook finds its backend: one engine at a time uses a data directory."""
    if backend != "embedded":
        return where
    home, model = where.split(",")
    return f"{home}/{style},{model}"
