"""Every command line in the README and the docs parses."""

from __future__ import annotations

import re
import shlex
from copy import copy
from pathlib import Path

import click
import pytest

from tinkex.cli import tinkex
from tinkex.cli.paths import CheckpointPath, RunId

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
GENERATED = {"cli.md", "config.md", "surface.md"}
WRITTEN = [page for page in PAGES if page.name not in GENERATED]


def lines_of(page: Path) -> list[str]:
    """Returns the tinkex commands in bash blocks, with continued lines joined."""
    blocks = re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [line for line in lines if re.match(r"(\.venv/bin/)?tinkex ", line)]


def parse(line: str) -> None:
    command: click.Command = tinkex
    arguments = shlex.split(line.replace(">>", "#"), comments=True)[1:]
    context = click.Context(command)
    while isinstance(command, click.Group) and arguments:
        while arguments and arguments[0].startswith("-"):
            option = arguments.pop(0)  # an option of the group, for example --json
            if not any(option in known.opts and is_flag(known) for known in command.params):
                arguments.pop(0)
        if not arguments and command.invoke_without_command:
            return
        found = command.get_command(context, arguments.pop(0))
        assert found is not None, line
        command = found
    any_path(command).make_context(line, arguments)


def any_path(command: click.Command) -> click.Command:
    """Returns a copy of the command that accepts files and checkpoints that do not exist."""
    relaxed = copy(command)
    relaxed.params = [copy(parameter) for parameter in command.params]
    for parameter in relaxed.params:
        if isinstance(parameter.type, click.Path):
            parameter.type = click.Path()
        if isinstance(parameter.type, CheckpointPath | RunId):  # short names are looked up on a server
            parameter.type = click.STRING
    return relaxed


def is_flag(parameter: click.Parameter) -> bool:
    return isinstance(parameter, click.Option) and parameter.is_flag


LINES = [(page, line) for page in WRITTEN for line in lines_of(page)]


@pytest.mark.parametrize(("page", "line"), LINES, ids=[f"{p.relative_to(ROOT)}: {line}" for p, line in LINES])
def test_a_command_parses(page: Path, line: str) -> None:
    parse(line)


INLINE = [
    pytest.param(command, id=f"{page.relative_to(ROOT)}: {command}")
    for page in WRITTEN
    for command in sorted(set(re.findall(r"`(tinkex [^`]+)`", page.read_text())))
]


@pytest.mark.parametrize("command", INLINE)
def test_a_command_in_the_text_exists_with_its_options(command: str) -> None:
    found: click.Command = tinkex
    args = shlex.split(command)[1:]
    context = click.Context(found)
    while isinstance(found, click.Group) and args and re.fullmatch(r"[a-z-]+", args[0]):
        if args[0].startswith("-"):
            args.pop(0)
            continue
        inner = found.get_command(context, args.pop(0))
        assert inner is not None, command
        found = inner
    options = {name for parameter in found.params for name in (*parameter.opts, *parameter.secondary_opts)}
    for arg in args:
        if arg.startswith("-") and arg not in {"-h", "--help"}:
            assert arg.split("=")[0] in options, f"{command}: {arg}"
