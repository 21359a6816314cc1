"""An installation without the compiled core: it samples with torch, says so once, and says why."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tinkex
from tinkex.engine.kernels.build import LIBRARY, build_error_file

pytestmark = pytest.mark.slow

SAMPLE_TWICE = """
import sys
from pathlib import Path
import numpy as np
from tinkex.engine.model.loader import load_transformer
from tinkex.engine.model.tokenizer import EngineTokenizer
from tinkex.engine.sampler.sampler import SampleJob, Sampler
from tinkex.types import SamplingParams

directory = Path(sys.argv[1])
model, tokenizer = load_transformer(directory), EngineTokenizer(directory)
for _ in range(2):
    sampler = Sampler(model, tokenizer, compute=sys.argv[2])
    for name in ("a", "b"):
        sampler.add(SampleJob(name, None, np.array([1, 5, 9], np.int32), 1, SamplingParams(max_tokens=2), [name]))
    while sampler.busy:
        for name, response in sampler.step():
            print(name, len(response.sequences[0].tokens))
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a copy of the package as it is built without a C compiler."""
    directory = tmp_path_factory.mktemp("without-core")
    left_out = shutil.ignore_patterns("__pycache__", LIBRARY.name, build_error_file().name)
    shutil.copytree(Path(tinkex.__file__).parent, directory / "tinkex", ignore=left_out)
    build = directory / "tinkex/engine/kernels/build.py"
    code = "import runpy, sys; print(runpy.run_path(sys.argv[1])['build_for_package']().name)"
    done = subprocess.run(
        [sys.executable, "-c", code, str(build)],
        env={"PATH": str(directory)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == build_error_file().name
    return directory


def run(package: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    hidden = ("TINKER_", "TINKEX_")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    return subprocess.run(
        [sys.executable, *arguments],
        env={**environ, "PYTHONPATH": str(package), "HOME": str(package), **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_first_sample_says_once_what_it_costs_why_and_what_to_do(package: Path, tiny_model: Path) -> None:
    done = run(package, "-c", SAMPLE_TWICE, str(tiny_model), "auto")
    assert done.stdout.split() == ["a", "2", "b", "2"] * 2, done.stderr
    [line] = done.stderr.splitlines()
    assert "half the speed" in line
    assert "no C compiler was found" in line
    assert "pip install" in line


def test_torch_by_choice_is_not_worth_a_line(package: Path, tiny_model: Path) -> None:
    done = run(package, "-c", SAMPLE_TWICE, str(tiny_model), "torch")
    assert (done.stdout.split(), done.stderr) == (["a", "2", "b", "2"] * 2, "")


@pytest.mark.parametrize(
    ("compute", "state", "detail"),
    [
        ("auto", "note", "no C compiler was found"),
        ("compiled", "problem", "no C compiler was found"),
        ("torch", "note", "disabled by TINKEX_SAMPLER_COMPUTE=torch"),
    ],
)
def test_the_doctor_says_why_there_is_no_core(package: Path, compute: str, state: str, detail: str) -> None:
    arguments = ("-m", "tinkex", "doctor", "--local", "--port", "0", "--json")
    done = run(package, *arguments, TINKEX_SAMPLER_COMPUTE=compute)
    [found] = [check for check in json.loads(done.stdout)["checks"] if check["check"] == "compiled core"]
    assert found["state"] == state
    assert detail in found["detail"]
    assert found["fix"]
    assert done.returncode == (1 if state == "problem" else 0), done.stderr
