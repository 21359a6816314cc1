"""The commands of the README print what the README shows, on the default model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts.docsite.terminal import record

pytestmark = pytest.mark.real_model

ROOT = Path(__file__).parents[2]
SHOWN = re.compile(r"^```bash\n(tinkex [^\n]*)\n```\n\n```text\n(.*?)\n```", re.MULTILINE | re.DOTALL)
ANYTHING = "…"
"""A line of the README that stands for any lines."""
VARIES = re.compile(
    r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|in \d+ s|(?<=\d\.)\d{3}(?= after step)|(?<=^Before ).*",
    re.MULTILINE,
)
"""Ids, times, and what the rounding of another processor may change: the digits of losses, a long answer of the base model."""


def pattern_of(shown: str) -> str:
    """Returns a pattern for what a command prints."""
    lines = shown.split("\n")
    return r"\n".join(r"[\s\S]*?" if line == ANYTHING else re.escape(line) for line in lines)


def without_ids(text: str) -> str:
    return VARIES.sub("", text)


def test_every_command_at_the_prompt_prints_what_is_shown(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    section = (ROOT / "README.md").read_text().split("\n## At the prompt\n")[1]
    found = SHOWN.findall(section)
    assert [command.split()[1] for command, _ in found] == ["sample", "train", "sample", "checkpoint"]
    env = {"TINKEX_DATA_DIR": str(tmp_path / "data"), "TINKER_TELEMETRY": "0"}
    for command, shown in found:
        printed = without_ids("\n".join(record(command, tmp_path, env).screen))
        assert re.fullmatch(pattern_of(without_ids(shown)), printed), printed
