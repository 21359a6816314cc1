"""Runs every command of the official `tinker` command line against one server, in a process of its own.

Prints one JSON object: command → "works", or what it said.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import click
import tinker
from click.testing import CliRunner
from tinker.cli.__main__ import main_cli as cli

MODEL = "tiny/llama"


def commands(group: click.Group, prefix: str = "") -> Iterator[str]:
    """The names of all commands."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from commands(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}"


def main() -> None:
    warnings.simplefilter("ignore")
    key = sys.argv[1]
    with tempfile.TemporaryDirectory() as temporary, tinker.ServiceClient() as service:
        folder = Path(temporary)
        training = service.create_lora_training_client(MODEL, rank=2)
        paths = [training.save_state(name).result().path for name in ("a", "b")]
        run = training.model_id
        session = run.partition(":")[0]
        hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
        window = [when.isoformat() for when in (hour - timedelta(hours=1), hour)]
        cases: dict[str, tuple[list[str], str | None]] = {
            "version": ([], None),
            "auth login": ([], f"{key}\n"),
            "auth status": ([], None),
            "auth whoami": ([], None),
            "auth logout": ([], None),
            "model list": ([], None),
            "run list": (["--limit", "0"], None),
            "run info": ([run], None),
            "checkpoint list": (["--run-id", run], None),
            "checkpoint info": ([paths[0]], None),
            "checkpoint publish": ([paths[0]], None),
            "checkpoint unpublish": ([paths[0]], None),
            "checkpoint set-ttl": ([paths[0], "--ttl", "7200"], None),
            "checkpoint download": ([paths[0], "-o", str(folder)], None),
            "checkpoint push-hf": ([paths[0], "--repo", "ada/mine"], None),
            "checkpoint delete": ([*paths, "-y"], None),
            "session export-trace": ([session, "-o", str(folder / "trace.json")], None),
            "billing usage": (window, None),
            "billing checkpoint-storage": ([], None),
        }
        results: dict[str, str] = {}
        for name in sorted(commands(cli), key=lambda each: list(cases).index(each) if each in cases else 99):
            if name not in cases:
                results[name] = "not driven"
                continue
            arguments, typed = cases[name]
            done = CliRunner().invoke(cli, [*name.split(), *arguments], input=typed)
            results[name] = "works" if done.exit_code == 0 else f"exit {done.exit_code}: {done.output}"[:400]
    print(json.dumps(results))


if __name__ == "__main__":
    main()
