"""The commands of the guide on training, as they are typed, on a tiny model and with fewer steps."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.cli.commands import tinkex
from tests.docs.test_commands import lines_of

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "guides" / "training.md"
SMALL = ("--steps", "2", "--rank", "2", "--sample-tokens", "2")


def test_every_command_of_the_guide_runs(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    blocks = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    (rewards,) = [block for block in blocks if "def is_short" in block]
    (tmp_path / "rewards.py").write_text(rewards)
    lines = lines_of(GUIDE)
    assert len(lines) >= 7
    for line in lines:
        _, *command = shlex.split(line, comments=True)
        if command[1] in {"sft", "dpo", "grpo"}:
            command += SMALL
        if command[1] == "grpo":
            command += ("--max-tokens", "4", "--group-size", "2")
        done = tinkex(*command, home=tmp_path, cwd=tmp_path, TINKEX_MODELS=f"tiny/llama={tiny_model}")
        assert done.code == 0, (line, done.err)
        assert done.out, line
    assert (tmp_path / "my-run" / "report.html").exists()
