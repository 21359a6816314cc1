"""The server guide: its commands and its settings file are valid, and its demonstration works."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest

from tests.durability.killable import KillableServer
from tinkex.cli import tinkex
from tinkex.cli.server import engine_config
from tinkex.cli.server_settings import read_settings
from tinkex.engine.api.metrics import metrics_text
from tinkex.engine.api.request_metrics import RequestMetrics
from tinkex.engine.config import EngineConfig
from tinkex.engine.engine import Engine

pytestmark = pytest.mark.slow

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "server.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)


COMMANDS = [line for block in blocks("bash") for line in block.splitlines() if line.startswith("tinkex ")]


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_of_the_guide_parses(line: str) -> None:
    command: click.Command = tinkex
    arguments = shlex.split(line)[1:]
    context = click.Context(command)
    while isinstance(command, click.Group):
        found = command.get_command(context, arguments.pop(0))
        assert found is not None
        command = found
    command.make_context(line, arguments)


def test_the_settings_file_of_the_guide_is_valid(tmp_path: Path) -> None:
    (text,) = blocks("toml")
    file = tmp_path / "server.toml"
    file.write_text(text)
    settings = read_settings({}, {}, file)
    assert settings.keys() >= tomllib.loads(text).keys()
    config = engine_config(settings)
    assert config.max_disk_bytes == 200 * 2**30
    assert config.result_retention_s == 12 * 3600


def test_the_guide_lists_all_metrics(tmp_path: Path) -> None:
    engine = Engine(
        EngineConfig(home=tmp_path, models={"tiny": str(tmp_path)}, worker="process", max_samplers=2)
    )
    text = metrics_text(engine.stats(), RequestMetrics(), "0")
    engine.close()
    listed = {
        name
        for row in re.findall(r"^\| (`tinkex_.*?) \|", GUIDE, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", row)
    }
    assert listed == set(re.findall(r"^# TYPE (\w+)", text, re.MULTILINE))


def test_the_demonstration_prints_the_same_losses_with_and_without_a_kill(
    tiny_model: Path, tmp_path: Path
) -> None:
    (program,) = blocks("py")

    def losses(server: KillableServer, kill_at: str | None) -> list[str]:
        environment = {
            **os.environ,
            "TINKER_BASE_URL": server.url,
            "TINKER_API_KEY": server.key,
            "PYTHONWARNINGS": "ignore",
        }
        process = subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment
        )
        assert process.stdout is not None
        printed: list[str] = []
        with process.stdout:
            for line in process.stdout:
                printed.append(line)
                if line.split()[0] == kill_at:
                    server.restart()
        assert process.wait(90) == 0
        return printed

    with KillableServer(tmp_path, tiny_model) as server:
        undisturbed = losses(server, None)
        assert len(undisturbed) == 20
        assert losses(server, "6") == undisturbed
        server.wait()
