"""Every command of the cookbook runs as it is typed, on a tiny model and with fewer steps; scripts/cookbook writes the outputs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.commands import tinkex
from tests.servers import ServedEngine

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
COOKBOOK = ROOT / "docs" / "cookbook"
PAGES = sorted(page for page in COOKBOOK.glob("*.md") if page.name != "index.md")
BLOCK = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)
SMALL = {
    "sft": "--epochs 1 --steps 2 --rank 2 --sample-tokens 2 --max-length 256 --too-long cut",
    "dpo": "--epochs 1 --steps 2 --rank 2 --sample-tokens 2 --max-length 256 --too-long cut",
    "grpo": "--steps 2 --rank 2 --sample-tokens 2 --max-tokens 4 --group-size 2 --batch-size 2",
}


def parts(block: str) -> Iterator[tuple[bool, str]]:
    """Splits a block into commands of ours, each whole, and what a shell runs before, between and after them."""
    lines = block.replace("\\\n", " ").splitlines(keepends=True)
    shell = ""
    for line in lines:
        if line.startswith("tinkex "):
            yield False, shell
            yield True, line
            shell = ""
        else:
            shell += line
    yield False, shell


def smaller(command: list[str]) -> list[str]:
    """Returns the command with fewer steps and tokens; of an option given twice, the last one counts."""
    if command[0] == "train":
        command = [word for word in command if word != "--keep-best"]
        if "--epochs" in command:
            del command[command.index("--epochs") : command.index("--epochs") + 2]
        return command + shlex.split(SMALL[command[1]].replace("--epochs 1 ", ""))
    return [*command, "--limit", "2"] if command[0] == "eval" else command


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_of_a_page_run(
    page: Path, tiny_model: Path, served_engine: ServedEngine, tmp_path: Path
) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    teacher = {"TEACHER_URL": served_engine.url, "TEACHER_KEY": served_engine.key}
    environment = {
        **os.environ,
        **teacher,
        "TEACHER_MODEL": "tiny/llama",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    blocks = BLOCK.findall(page.read_text())
    assert blocks
    for block in blocks:
        for is_ours, text in parts(block):
            if is_ours:
                words = [
                    found
                    for word in shlex.split(text, comments=True)[1:]
                    for found in (sorted(map(str, tmp_path.glob(word))) if "*" in word else [word])
                ]
                done = tinkex(
                    *smaller(words), home=tmp_path, cwd=tmp_path, TINKEX_MODELS=f"tiny/llama={tiny_model}"
                )
                assert done.code == 0, (text, done.err)
            elif text:
                subprocess.run(["bash", "-ec", text], cwd=tmp_path, env=environment, check=True)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_outputs_on_a_page_come_with_the_machine_and_the_time(page: Path) -> None:
    text = page.read_text()
    shown = re.findall(r"^```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    measured = re.search(r"^Measured: all commands of this page took .* cores", text, re.MULTILINE)
    assert shown
    assert measured
    assert all(block.strip("…\n") for block in shown)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_can_be_found(page: Path) -> None:
    assert f"({page.name})" in (COOKBOOK / "index.md").read_text()
    assert f"cookbook/{page.name}" in (ROOT / "mkdocs.yml").read_text()
