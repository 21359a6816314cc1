"""Every command line of the README and the docs is understood, with its options, by the program there is."""

from __future__ import annotations

import re
import shlex
from copy import copy
from pathlib import Path

import click
import pytest

from tinkex.cli import tinkex

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
GENERATED = {"cli.md", "config.md", "surface.md"}
WRITTEN = [page for page in PAGES if page.name not in GENERATED]


def lines_of(page: Path) -> list[str]:
    """Whole commands: the lines of bash blocks that begin with tinkex, continued ones joined, without comments."""
    blocks = re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [line for line in lines if re.match(r"(\.venv/bin/)?tinkex ", line)]


def parsed(line: str) -> None:
    command: click.Command = tinkex
    arguments = shlex.split(line.replace(">>", "#"), comments=True)[1:]
    context = click.Context(command)
    while isinstance(command, click.Group) and arguments:
        while arguments and arguments[0].startswith("-"):
            arguments.pop(0)  # an option of the group, such as --json
        found = command.get_command(context, arguments.pop(0))
        assert found is not None, line
        command = found
    any_path(command).make_context(line, arguments)


def any_path(command: click.Command) -> click.Command:
    """The same command for files that the reader is to make, and that do not exist here; the original is left alone."""
    relaxed = copy(command)
    relaxed.params = [copy(parameter) for parameter in command.params]
    for parameter in relaxed.params:
        if isinstance(parameter.type, click.Path):
            parameter.type = click.Path()
    return relaxed


LINES = [(page, line) for page in WRITTEN for line in lines_of(page)]


@pytest.mark.parametrize(("page", "line"), LINES, ids=[f"{p.relative_to(ROOT)}: {line}" for p, line in LINES])
def test_a_command_is_understood(page: Path, line: str) -> None:
    parsed(line)


INLINE = [
    pytest.param(command, id=f"{page.relative_to(ROOT)}: {command}")
    for page in WRITTEN
    for command in sorted(set(re.findall(r"`(tinkex [^`]+)`", page.read_text())))
]


@pytest.mark.parametrize("command", INLINE)
def test_a_command_in_the_text_exists_with_its_options(command: str) -> None:
    found: click.Command = tinkex
    words = shlex.split(command)[1:]
    context = click.Context(found)
    while isinstance(found, click.Group) and words and re.fullmatch(r"[a-z-]+", words[0]):
        if words[0].startswith("-"):
            words.pop(0)
            continue
        inner = found.get_command(context, words.pop(0))
        assert inner is not None, command
        found = inner
    options = {name for parameter in found.params for name in (*parameter.opts, *parameter.secondary_opts)}
    for word in words:
        if word.startswith("-") and word not in {"-h", "--help"}:
            assert word.split("=")[0] in options, f"{command}: {word}"
