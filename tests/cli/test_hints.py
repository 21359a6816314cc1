"""What a command advises can be typed, and holds where the command ran."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.commands import tinkex
from tests.cli.test_interrupts import interrupted
from tests.servers import ServedEngine
from tinkex.cli.failures import failure_of
from tinkex.errors import APIConnectionError, ConfigError

pytestmark = pytest.mark.slow

MISSING = (
    ("checkpoint", "info", "tinker://abc:train:0/weights/x"),
    ("run", "info", "abc:train:0"),
    ("sample", "hi", "--model", "nope/x"),
    ("sample", "hi", "--model-path", "tinker://abc:train:0/weights/x"),
    ("session", "info", "abc"),
)


@pytest.mark.parametrize("command", MISSING, ids=" ".join)
def test_something_missing_is_explained_with_commands_for_its_server(
    served_engine: ServedEngine, command: tuple[str, ...], tmp_path: Path
) -> None:
    done = tinkex(*command, server=served_engine)
    assert done.code == 1
    for python in ("()", "RestClient", "create_session", "client."):
        assert python not in done.err
    assert "Hint: see what this key has with: tinkex run list," in done.err
    named = tinkex(*command, "--base-url", served_engine.url, home=tmp_path, TINKER_API_KEY=served_engine.key)
    assert f"Hint: see what this key has with: tinkex run list --base-url {served_engine.url}," in named.err


def test_on_this_machine_nothing_is_said_about_servers_keys_and_statuses(
    tiny_model: Path, tmp_path: Path
) -> None:
    for command in MISSING:
        done = tinkex(*command, "--local", home=tmp_path, TINKEX_MODELS=f"tiny/llama={tiny_model}")
        assert done.code == 1, command
        for word in ("server", " key", "404", "RestClient", "serve "):
            assert word not in done.err, (command, done.err)
        hint = "Hint: see what is there with: tinkex run list --local, tinkex checkpoint list --local or tinkex model list --local"
        assert hint in done.err.splitlines()


def test_a_failed_download_of_a_model_does_not_advise_what_is_done(tmp_path: Path) -> None:
    done = tinkex(
        "model", "pull", "nobody/nothing", home=tmp_path, HF_ENDPOINT="http://127.0.0.1:9", HF_HUB_OFFLINE="0"
    )
    assert done.code == 1
    assert "make the Hugging Face Hub reachable" in done.err
    assert "pip install" not in done.err, "it is installed here"


def test_an_interrupt_before_the_run_exists_does_not_say_how_to_resume_it(
    tiny_model: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "Where?", "completion": "The sea."}\n' * 4)
    database = tmp_path / ".tinkex" / "engine"
    stopped = interrupted(
        "train", "sft", str(data), "--local", "-o", str(tmp_path / "run"), when=database.exists, home=tmp_path,
        TINKEX_MODELS=f"tiny/llama={tiny_model}",
    )  # fmt: skip
    assert ("Resume with:" in stopped.err) == (tmp_path / "run" / "run.toml").exists()


def test_a_checkpoint_that_is_missing_on_this_machine_is_listed_there(
    tiny_model: Path, tmp_path: Path
) -> None:
    command = ("sample", "Where?", "--model-path", "@last", "--local")
    done = tinkex(*command, home=tmp_path, TINKEX_MODELS=f"tiny/llama={tiny_model}")
    assert done.code == 1
    assert "list yours with: tinkex checkpoint list --local\n" in done.err


def test_a_run_whose_server_fails_says_how_to_resume_it() -> None:
    command = "Resume with: tinkex train sft --resume run"
    failure = failure_of(APIConnectionError(), interrupt_hint=command)
    assert failure.hint is not None
    assert failure.hint.endswith(f"--local needs no server. {command}")
    rejected = failure_of(ConfigError("no"), interrupt_hint=command)
    assert rejected.hint is None
