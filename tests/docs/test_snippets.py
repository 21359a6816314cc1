"""Every Python block of the README and the docs runs as it stands, and the README shows what is true.

The blocks of a page run in one program, in their order. The README's run on the real model; the pages of docs/ name it
too, and get a tiny one under its name, because only its words would differ.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
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
    """The user's model cache, and a data directory nobody else uses."""
    return {**os.environ, "TINKEX_DATA_DIR": str(data_dir), "TINKER_TELEMETRY": "0"}


def run_page(page: Path, where: Path, settings: dict[str, str]) -> None:
    run = subprocess.run(
        [
            sys.executable,
            "-W",
            "error::DeprecationWarning:tinkex",
            str(Path(__file__).with_name("page_program.py")),
            str(page),
        ],
        env={**environment(where / "data"), **settings},
        cwd=where,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert run.returncode == 0, run.stderr


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model") / "small")


@pytest.mark.real_model
def test_the_readme_runs(tmp_path: Path) -> None:
    run_page(README, tmp_path, {})


@pytest.mark.parametrize("page", RUN, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_blocks_of_a_page_run(page: Path, small_model: Path, tmp_path: Path) -> None:
    settings = {"TINKEX_MODELS": f"{REAL_MODEL}={small_model}", "OMP_NUM_THREADS": "1"}
    run_page(page, tmp_path, {"TINKEX_HOME": str(tmp_path / "home"), **settings})


@pytest.mark.real_model
def test_the_quickstart_teaches_the_habit(tmp_path: Path) -> None:
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
def test_links_to_files_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target
