"""The notebooks run from the first cell to the last on the embedded engine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.test_generations import notebook_packages

__all__ = ["notebook_packages"]

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


def outputs(path: Path) -> list[list[str]]:
    """Returns the types of the outputs of every cell with code."""
    cells = json.loads(path.read_text())["cells"]
    return [[out["output_type"] for out in cell["outputs"]] for cell in cells if cell["cell_type"] == "code"]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(notebook: Path, notebook_packages: Path, tiny_model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "examples" / "notebooks" / notebook.name
    copy.parent.mkdir(parents=True)
    shutil.copyfile(notebook, copy)
    program = tmp_path / "scripts" / "notebooks"
    program.parent.mkdir()
    shutil.copyfile(ROOT / "scripts" / "notebooks", program)
    environment = {
        **os.environ,
        "HOME": str(tmp_path),
        "JUPYTER_PLATFORM_DIRS": "1",
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", notebook_packages))),
        "TINKEX_MODELS": f"{MODEL}={tiny_model}",
    }
    done = subprocess.run(
        [sys.executable, str(program)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    # The display replaces one output: a bar and a curve, whatever the number of steps.
    assert "tinkex-run" in copy.read_text()
    assert "<svg" in copy.read_text()
    assert [kinds.count("display_data") for kinds in outputs(copy)].count(1) == 1


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_outputs_are_those_of_a_whole_run_without_paths_of_a_machine(notebook: Path) -> None:
    kinds = outputs(notebook)
    every = {kind for of_cell in kinds for kind in of_cell}
    assert "display_data" in every
    assert "error" not in every
    assert kinds[-1]
    text = notebook.read_text()
    assert str(ROOT) not in text
    assert "/tmp/" not in text
