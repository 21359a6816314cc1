"""Every Python block of the README and the docs runs as it stands, and the README shows what is true."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
SNIPPETS = [
    pytest.param(block, id=f"{page.relative_to(ROOT)}-{number}")
    for page in PAGES
    for number, block in enumerate(BLOCK.findall(page.read_text()))
]


def environment(data_dir: Path) -> dict[str, str]:
    """The user's model cache, and a data directory nobody else uses."""
    return {**os.environ, "TINKEX_DATA_DIR": str(data_dir), "TINKER_TELEMETRY": "0"}


@pytest.mark.real_model
@pytest.mark.parametrize("snippet", SNIPPETS)
def test_a_snippet_runs(snippet: str, tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:tinkex", "-c", snippet],
        env=environment(tmp_path / "data"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert run.returncode == 0, run.stderr


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


def test_the_coverage_table_has_a_row_for_every_requirement_and_names_real_files() -> None:
    table = (ROOT / "docs" / "coverage.md").read_text()
    rows = re.findall(r"^\| (R\d\d) \|(.*)$", table, re.MULTILINE)
    assert [name for name, _ in rows] == [f"R{n:02}" for n in [*range(1, 22), *range(30, 41)]]
    for name, row in rows:
        for path in re.findall(r"`([\w./{},-]+)`", row):
            if "/" in path and "{" not in path:
                assert (ROOT / path).exists() or (ROOT / "src" / "tinkex" / path).exists(), f"{name}: {path}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_to_files_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target
