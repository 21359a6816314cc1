"""The command line without any request: help, options, usage errors."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from tests.cli.commands import tinkex
from tinkex.cli import tinkex as root
from tinkex.cli.groups import Leaf

HEAVY = {
    "asyncio",
    "google",
    "huggingface_hub",
    "matplotlib",
    "msgspec",
    "numpy",
    "pyqwest",
    "rich",
    "ssl",
    "starlette",
    "tokenizers",
    "torch",
    "transformers",
    "uvicorn",
}


def every_command(group: click.Command = root, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if not isinstance(group, click.Group):
        return [path]
    ctx = click.Context(group)
    found = [path]
    for name in group.list_commands(ctx):
        command = group.get_command(ctx, name)
        assert command is not None
        found += every_command(command, (*path, name))
    return found


COMMANDS = every_command()


@pytest.mark.slow
def test_all_help_together_loads_nothing_heavy() -> None:
    program = (
        "import contextlib, io, sys\n"
        "from tinkex.cli import tinkex\n"
        f"for path in {COMMANDS!r}:\n"
        "    with contextlib.redirect_stdout(io.StringIO()):\n"
        "        tinkex([*path, '-h'], prog_name='tinkex', standalone_mode=False)\n"
        "print(*sorted(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert not {name.split(".")[0] for name in loaded} & HEAVY
    assert not [
        name for name in loaded if name.startswith(("tinkex.engine", "tinkex.clients", "tinkex.types"))
    ]


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_command_has_two_examples_and_every_option_has_help(path: tuple[str, ...]) -> None:
    done = CliRunner().invoke(root, [*path, "-h"], prog_name="tinkex")
    assert done.exit_code == 0
    command = root
    for name in path:
        command = command.get_command(click.Context(command), name)  # type: ignore[attr-defined, assignment]
    if not isinstance(command, click.Group):
        examples = done.output.partition("Examples:\n")[2]
        assert examples.count(f"tinkex {' '.join(path)}") >= 2
        for option in command.params:
            if isinstance(option, click.Option):
                assert option.help, option.opts


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_command_lists_truncate_no_summary(path: tuple[str, ...]) -> None:
    done = CliRunner().invoke(root, [*path, "-h"], prog_name="tinkex", terminal_width=80)
    listed = done.output.partition("\nCommands:\n")[2]
    assert not [line for line in listed.splitlines() if line.endswith("...")]


def test_the_short_help_option_works_in_every_context() -> None:
    leaf = Leaf("example", callback=lambda: None)
    leaf.to_info_dict(click.Context(leaf))  # a context with only --help
    assert CliRunner().invoke(leaf, ["-h"]).exit_code == 0


@pytest.mark.slow
def test_all_commands_and_options_of_the_official_program_exist() -> None:
    from tinker.cli.__main__ import main_cli  # type: ignore[import-not-found]

    def options(group: click.Group, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], set[str]]:
        found: dict[tuple[str, ...], set[str]] = {}
        for name in group.list_commands(click.Context(group)):
            command = group.get_command(click.Context(group), name)
            assert command is not None
            if isinstance(command, click.Group):
                found |= options(command, (*path, name))
            else:
                found[(*path, name)] = {opt for p in command.params for opt in p.opts if opt.startswith("-")}
        return found

    ours = options(root)
    for path, expected in options(main_cli).items():
        assert path in ours
        assert expected <= ours[path], path


@pytest.mark.slow
def test_an_unknown_command_suggests_the_closest() -> None:
    done = tinkex("checkpont", process=True)
    assert (done.code, done.out) == (2, "")
    assert "Did you mean 'checkpoint'?" in done.err


@pytest.mark.slow
def test_the_error_for_a_missing_key_names_every_solution(tmp_path) -> None:
    done = tinkex("run", "list", home=tmp_path, process=True)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("Error: ")
    for solution in ("tinkex auth login", "TINKER_API_KEY", "--local"):
        assert solution in done.err


def test_an_invalid_path_is_a_usage_error() -> None:
    done = tinkex("checkpoint", "info", "tinker://run/weights")
    assert done.code == 2
    assert "tinker://<run>/weights/<name>" in done.err


def test_the_version_as_text_and_json() -> None:
    assert tinkex("version").out.startswith("tinkex 0.")
    value = tinkex("version", "--deps", "--json").json
    assert value["dependencies"]["numpy"]
    assert tinkex("-f", "json", "version").json == {"version": value["version"]}


@pytest.mark.parametrize("path", [(), ("train",), ("checkpoint",), ("model",)], ids=" ".join)
def test_a_command_group_alone_prints_its_help(path: tuple[str, ...]) -> None:
    done = tinkex(*path)
    assert (done.code, done.err) == (0, "")
    assert done.out == tinkex(*path, "-h").out


@pytest.mark.parametrize(
    "path", [("version",), ("completion",), ("keys", "list"), ("model", "pull")], ids=" ".join
)
def test_commands_without_a_server_show_no_options_for_one(path: tuple[str, ...]) -> None:
    shown = tinkex(*path, "-h").out
    assert "--json" in shown
    for option in ("--base-url", "--api-key", "--timeout", "--local"):
        assert option not in shown


def test_options_are_explained_in_plain_words() -> None:
    shown = " ".join(tinkex("train", "grpo", "-h").out.split())
    for text in (
        "Maximum tokens per example.",
        "Maximum new tokens of an answer.",
        "Random seed for adapter and shuffling.",
        "Expire after this many seconds",
    ):
        assert text in shown
    assert "Expire after this many seconds." in " ".join(tinkex("checkpoint", "save", "-h").out.split())
