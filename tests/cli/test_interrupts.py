"""Ctrl-C in the middle of work, on the real process: exit code 130, no trace, what is done is kept, and how to go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.commands import Done, tinkex
from tests.cli.relay import Relay, relay
from tests.servers import ServedEngine
from tests.unit.checkpoints.hub_standin import hub
from tests.unit.engine.model.hub_server import hub_server

pytestmark = pytest.mark.slow

AGAIN = "Hint: run the same command again: it goes on where it stopped\n"


@pytest.fixture(scope="module")
def saved(served_engine: ServedEngine) -> str:
    """A training checkpoint that takes more than a few packets."""
    new = ("--name", "interrupted", "--kind", "training", "--rank", "32", "--json")
    path: str = tinkex("checkpoint", "save", "--base-model", "tiny/llama", *new, server=served_engine).json[
        "path"
    ]
    return path


def interrupted(*arguments: str, when: Callable[[], object], home: Path, **env: str) -> Done:
    """The command, with Ctrl-C once the condition holds."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tinkex", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "TINKER_TELEMETRY": "0", "HOME": str(home), "TINKEX_HOME": str(home / ".tinkex"), **env},
        cwd=home,
        text=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        while not when():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert "Traceback" not in err
    assert process.returncode == 130, err
    assert "Interrupted" in err
    return Done(process.returncode, out, err)


def at(there: Relay, server: ServedEngine) -> dict[str, str]:
    return {"TINKER_BASE_URL": there.url, "TINKER_API_KEY": server.key}


def test_a_download_goes_on_where_it_stopped(served_engine: ServedEngine, saved: str, tmp_path: Path) -> None:
    command = ("checkpoint", "download", saved)
    with relay(served_engine.url, "/downloads/", passed=60_000) as there:

        def arrived() -> int:
            return sum(file.stat().st_size for file in tmp_path.glob(".*.partial/archive.tar.part"))

        stopped = interrupted(
            *command, when=lambda: arrived() > 40_000, home=tmp_path, **at(there, served_engine)
        )
        assert stopped.out == ""
        assert stopped.err.endswith(AGAIN)
        kept = arrived()
        assert kept > 40_000
        assert [file.name for file in tmp_path.iterdir() if not file.name.startswith(".")] == []
        there.released.set()
        done = tinkex(*command, "--json", cwd=tmp_path, process=True, **at(there, served_engine)).json
        assert f"Range: bytes={kept}-".encode() in there.asked[-1]
    assert (tmp_path / done["destination"] / "adapter_model.safetensors").is_file()
    assert not list(tmp_path.glob(".*.partial"))


def test_a_sample_that_is_streamed_ends_at_once_also_when_the_server_is_silent(
    served_engine: ServedEngine, tmp_path: Path
) -> None:
    asked = ("sample", "The sea", "--max-tokens", "400", "--seed", "4")
    whole = tinkex(*asked, server=served_engine).out
    with relay(served_engine.url, "/stream_sample", passed=3_000) as there:
        stopped = interrupted(*asked, when=there.held.is_set, home=tmp_path, **at(there, served_engine))
    assert whole.startswith(stopped.out.rstrip("\n"))


def test_a_push_leaves_the_repository_as_it_was_and_can_be_made_again(
    served_engine: ServedEngine, saved: str, tmp_path: Path
) -> None:
    with hub() as far, relay(served_engine.url, "/downloads/", passed=20_000) as there:
        env = {"HF_ENDPOINT": far.url, "HF_TOKEN": far.token, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0",
               "HF_HUB_DISABLE_XET": "1", **at(there, served_engine)}  # fmt: skip
        command = ("checkpoint", "push-hf", saved, "--repo", "ada/mine")
        stopped = interrupted(*command, when=there.held.is_set, home=tmp_path, **env)
        assert stopped.err.endswith("Hint: the repository is as it was; run the same command again\n")
        assert far.repos == {}
        there.released.set()
        assert tinkex(*command, "--json", cwd=tmp_path, process=True, **env).json["repo_id"] == "ada/mine"
        assert "adapter_model.safetensors" in far.repos["ada/mine"]["main"]


def test_a_model_that_is_pulled_appears_whole_or_not_at_all(tiny_model: Path, tmp_path: Path) -> None:
    with hub_server({"tiny/pulled": tiny_model}) as far:
        with relay(far.url, "/resolve/", passed=100) as there:
            env = {"HF_ENDPOINT": there.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}  # fmt: skip
            command = ("model", "pull", "tiny/pulled")
            stopped = interrupted(*command, when=there.held.is_set, home=tmp_path, **env)
        assert stopped.err.endswith(AGAIN)
        models = tmp_path / ".tinkex" / "models"
        assert [file.name for file in models.iterdir() if not file.name.startswith(".")] == []
        env["HF_ENDPOINT"] = far.url
        done = tinkex(*command, "--json", process=True, home=tmp_path, **env).json
    assert (Path(done["directory"]) / "model.safetensors").is_file()


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_run_says_how_to_go_on_in_the_form_that_was_asked_for(
    served_engine: ServedEngine, tmp_path: Path, form: tuple[str, ...]
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "Q?", "completion": "The sea."}\n' * 4)
    run = tmp_path / "run"
    more = ("--rank", "2", "--steps", "100000", "--sample-tokens", "2", "-o", str(run), *form)
    env = {"TINKER_BASE_URL": served_engine.url, "TINKER_API_KEY": served_engine.key}

    def trained() -> bool:
        metrics = run / "metrics.jsonl"
        return metrics.exists() and metrics.read_text().count("\n") > 2

    stopped = interrupted("train", "sft", str(data), *more, when=trained, home=tmp_path, **env)
    assert stopped.out == ""
    assert f"go on with: tinkex train sft --resume {run}" in stopped.err
    if form:
        assert stopped.err.strip().count("\n") == 0, "one JSON object and nothing else"
