"""Every Python block of the README and the docs runs.

The blocks of a page run in request in one program. Those of the README run on the real model; those of docs/ run on a tiny
model with the same name, which only changes the sampled text.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.page_program import BLOCK
from tests.models import tiny_llama

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
RUN = [page for page in PAGES if page != README and BLOCK.search(page.read_text())]
REAL_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


def environment(data_dir: Path) -> dict[str, str]:
    """Returns an environment with the user's model cache and a separate data directory."""
    return {**os.environ, "TINKEX_DATA_DIR": str(data_dir), "TINKER_TELEMETRY": "0"}


PROGRAM = [
    sys.executable,
    "-W",
    "error::DeprecationWarning:tinkex",
    str(Path(__file__).with_name("page_program.py")),
]


@pytest.fixture(scope="module")
def pages_program() -> Iterator[subprocess.Popen[str]]:
    """A process that runs pages with their common imports loaded once."""
    settings = {**os.environ, "TINKER_TELEMETRY": "0", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        PROGRAM, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=settings
    ) as program:
        yield program


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model") / "small")


@pytest.mark.real_model
def test_the_readme_runs(tmp_path: Path) -> None:
    run = subprocess.run(
        [*PROGRAM, str(README)],
        env=environment(tmp_path / "data"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_blocks_of_a_page_run(
    page: Path, pages_program: subprocess.Popen[str], small_model: Path, tmp_path: Path
) -> None:
    assert pages_program.stdin is not None
    assert pages_program.stdout is not None
    output = tmp_path / "output"
    output.touch()
    request = {
        "page": str(page),
        "directory": str(tmp_path),
        "output": str(output),
        "environment": {
            "TINKEX_MODELS": f"{REAL_MODEL}={small_model}",
            "TINKEX_HOME": str(tmp_path / "home"),
            "TINKEX_DATA_DIR": str(tmp_path / "data"),
        },
    }
    pages_program.stdin.write(json.dumps(request) + "\n")
    pages_program.stdin.flush()
    assert pages_program.stdout.readline() == "0\n", output.read_text()


@pytest.mark.real_model
def test_the_quickstart_changes_the_answer_style(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "quickstart.py"), "--epochs", "4"],
        env=environment(tmp_path / "data"),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    before, after = run.stdout.split("After", 1)
    assert "Captain's log" not in before
    assert "Captain's log" in after
    assert "Checkpoint   tinker://" in after
    assert "Next:" in after
    assert "step 16/16" in run.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_linked_files_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target
