"""The commands of the README print what the README shows, on the default model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts.docsite.terminal import record
from tinkex.engine.config import EngineConfig

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCK = re.compile(r"^```(bash|text)\n(.*?)\n```$", re.MULTILINE | re.DOTALL)
ANYTHING = "…"
"""A line of the README that stands for any lines."""
NUMBER = "<number>"
VARIES = (
    (r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "<id>"),
    (r"\bin \d+ s\b", f"in {NUMBER} s"),
    (r"(?<=\d\.)\d{3}(?= after step)", NUMBER),
    (r"(?m)(?<=^Before   )(?!What).*", "<answer>"),
    (r"(?<=loss \d\.)\d{3}\b", NUMBER),
    (r"\d+ tokens/s  \d+ s left", f"{NUMBER} tokens/s  {NUMBER} s left"),
    (r"(?<=key tml-)\S+", "<key>"),
)
"""Ids, keys, times, and what the rounding of another processor may change: digits of losses, a long answer of the base model."""


def shown_outputs() -> list[tuple[str, str]]:
    """Returns every output in the README with the command that it belongs to: the first of the commands before it."""
    found, command = [], ""
    for language, content in BLOCK.findall(README):
        if language == "bash":
            command = content.split("\n")[0]
        else:
            found.append((command, content))
    return found


SHOWN = shown_outputs()


def output_of(command: str) -> str:
    return next(shown for line, shown in SHOWN if line.split("#")[0].strip() == command)


def normalised(text: str) -> str:
    for pattern, replacement in VARIES:
        text = re.sub(pattern, replacement, text)
    return text


def assert_printed(screen: list[str], shown: str) -> None:
    """Compares what stays on the terminal with what the README shows."""
    lines = normalised(shown).split("\n")
    pattern = r"\n".join(r"[\s\S]*?" if line == ANYTHING else re.escape(line) for line in lines)
    printed = normalised("\n".join(screen).strip("\n"))
    assert re.fullmatch(pattern, printed), f"{printed}\n\ninstead of\n\n{normalised(shown)}"


def settings(tmp_path: Path) -> dict[str, str]:
    return {"TINKEX_DATA_DIR": str(tmp_path / "data"), "TINKER_TELEMETRY": "0", "TINKER_BASE_URL": ""}


def test_every_output_belongs_to_a_command_that_a_test_runs() -> None:
    commands = [" ".join(re.split(r" +[-#\"]", line)[0].split()[:2]) for line, _ in SHOWN]
    assert commands == [
        "scripts/quickstart",
        "tinkex serve",
        "tinkex sample",
        "tinkex train",
        "tinkex sample",
        "tinkex checkpoint",
    ]
    assert len(SHOWN) == README.count("```text\n")


def test_an_output_that_differs_is_found() -> None:
    shown = "step 20/20  loss 0.002  134 tokens/s  0 s left\n…"
    assert_printed(["step 20/20  loss 0.003  90 tokens/s  1 s left", "", "more"], shown)
    with pytest.raises(AssertionError, match="instead of"):
        assert_printed(["step 19/20  loss 0.003  90 tokens/s  1 s left", "", "more"], shown)


@pytest.mark.real_model
def test_the_quickstart_prints_what_is_shown(tmp_path: Path) -> None:
    program = re.search(
        r'^exec \.venv/bin/python (\S+) "\$@"$', (ROOT / "scripts/quickstart").read_text(), re.MULTILINE
    )
    assert program is not None, "the script sets up .venv and runs a program"
    recording = record(str(ROOT / program[1]), tmp_path, settings(tmp_path))
    assert_printed(recording.screen, output_of("scripts/quickstart"))


@pytest.mark.real_model
def test_a_server_prints_what_is_shown(tmp_path: Path) -> None:
    recording = record("tinkex serve --port 0", tmp_path, settings(tmp_path), until=r"key tml-\S+\s")
    screen = [
        re.sub(r"(?<=http://127\.0\.0\.1:)\d+", str(EngineConfig.port), line) for line in recording.screen
    ]
    assert_printed(screen, output_of("tinkex serve"))


@pytest.mark.real_model
def test_every_command_at_the_prompt_prints_what_is_shown(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for command, shown in SHOWN[2:]:
        assert_printed(record(command, tmp_path, settings(tmp_path)).screen, shown)
