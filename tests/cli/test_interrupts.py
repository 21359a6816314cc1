"""Ctrl-C in a real process: exit code 130, no traceback, completed work is kept, and a hint how to resume."""

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

RESUME_HINT = "Run the same command again to resume the download.\n"


@pytest.fixture(scope="module")
def saved(served_engine: ServedEngine) -> str:
    """A training checkpoint of more than a few packets."""
    new = ("--name", "interrupted", "--kind", "training", "--rank", "32", "--json")
    path: str = tinkex("checkpoint", "save", "--base-model", "tiny/llama", *new, server=served_engine).json[
        "path"
    ]
    return path


def interrupted(*arguments: str, when: Callable[[], object], home: Path, **env: str) -> Done:
    """Runs the command and sends SIGINT when the condition holds."""
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


def proxied(proxy: Relay, server: ServedEngine) -> dict[str, str]:
    return {"TINKER_BASE_URL": proxy.url, "TINKER_API_KEY": server.key}


def test_an_interrupted_download_resumes(served_engine: ServedEngine, saved: str, tmp_path: Path) -> None:
    command = ("checkpoint", "download", saved)
    with relay(served_engine.url, "/downloads/", limit=60_000) as proxy:

        def arrived() -> int:
            return sum(file.stat().st_size for file in tmp_path.glob(".*.partial/archive.tar.part"))

        stopped = interrupted(
            *command, when=lambda: arrived() > 40_000, home=tmp_path, **proxied(proxy, served_engine)
        )
        assert stopped.out == ""
        assert stopped.err.endswith(RESUME_HINT)
        kept = arrived()
        assert kept > 40_000
        assert [file.name for file in tmp_path.iterdir() if not file.name.startswith(".")] == []
        proxy.released.set()
        done = tinkex(*command, "--json", cwd=tmp_path, process=True, **proxied(proxy, served_engine)).json
        assert f"range: bytes={kept}-".encode() in proxy.heads[-1]
    assert (tmp_path / done["destination"] / "adapter_model.safetensors").is_file()
    assert not list(tmp_path.glob(".*.partial"))


def test_a_streamed_sample_stops_immediately_even_if_the_server_stalls(
    served_engine: ServedEngine, tmp_path: Path
) -> None:
    command = ("sample", "The sea", "--max-tokens", "400", "--seed", "4")
    whole = tinkex(*command, server=served_engine).out
    with relay(served_engine.url, "/stream_sample", limit=3_000) as proxy:
        stopped = interrupted(
            *command, when=proxy.stalled.is_set, home=tmp_path, **proxied(proxy, served_engine)
        )
    assert whole.startswith(stopped.out.rstrip("\n"))


def test_an_interrupted_push_leaves_the_repository_unchanged_and_can_be_repeated(
    served_engine: ServedEngine, saved: str, tmp_path: Path
) -> None:
    with hub() as hub_, relay(served_engine.url, "/downloads/", limit=20_000) as proxy:
        env = {"HF_ENDPOINT": hub_.url, "HF_TOKEN": hub_.token, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0",
               "HF_HUB_DISABLE_XET": "1", **proxied(proxy, served_engine)}  # fmt: skip
        command = ("checkpoint", "push-hf", saved, "--repo", "ada/mine")
        stopped = interrupted(*command, when=proxy.stalled.is_set, home=tmp_path, **env)
        assert stopped.err.endswith("The repository is unchanged; run the same command again.\n")
        assert hub_.repos == {}
        proxy.released.set()
        assert tinkex(*command, "--json", cwd=tmp_path, process=True, **env).json["repo_id"] == "ada/mine"
        assert "adapter_model.safetensors" in hub_.repos["ada/mine"]["main"]


def test_an_interrupted_pull_leaves_no_partial_model(tiny_model: Path, tmp_path: Path) -> None:
    with hub_server({"tiny/pulled": tiny_model}) as hub_:
        with relay(hub_.url, "/resolve/", limit=100) as proxy:
            env = {"HF_ENDPOINT": proxy.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}  # fmt: skip
            command = ("model", "pull", "tiny/pulled")
            stopped = interrupted(*command, when=proxy.stalled.is_set, home=tmp_path, **env)
        assert stopped.err.endswith(RESUME_HINT)
        models = tmp_path / ".tinkex" / "models"
        assert [file.name for file in models.iterdir() if not file.name.startswith(".")] == []
        env["HF_ENDPOINT"] = hub_.url
        done = tinkex(*command, "--json", process=True, home=tmp_path, **env).json
    assert (Path(done["directory"]) / "model.safetensors").is_file()


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_an_interrupted_run_prints_the_resume_command_as_text_or_json(
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
    assert f"Resume with: tinkex train sft --resume {run}" in stopped.err
    if form:
        assert stopped.err.strip().count("\n") == 0, "one JSON object and nothing else"
