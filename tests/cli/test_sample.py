"""``tinkex sample`` as a newcomer types it: its defaults, and what it prints on a terminal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.commands import on_a_terminal, tinkex
from tests.servers import ServedEngine


def test_the_defaults_suit_a_first_prompt() -> None:
    shown = " ".join(tinkex("sample", "-h").out.split())
    assert "Maximum new tokens. [default: 128" in shown
    assert "0 is greedy. [default: 0.7]" in shown


@pytest.mark.slow
def test_an_answer_stops_at_the_end_of_its_turn(served_engine: ServedEngine, tmp_path: Path) -> None:
    data = tmp_path / "chats.jsonl"
    data.write_text('{"prompt": "Where?", "completion": "The sea."}\n' * 4)
    options = ("--rank", "4", "--steps", "12", "--learning-rate", "0.02", "--sample-tokens", "4", "--json")
    trained = tinkex("train", "sft", str(data), *options, server=served_engine, cwd=tmp_path).json
    common = ("--model-path", trained["sampler_checkpoint"], "--temperature", "0")
    assert tinkex("sample", "Where?", *common, server=served_engine).out == "The sea.\n"
    (one,) = tinkex("sample", "Where?", *common, "--json", server=served_engine).json["sequences"]
    assert one["stop_reason"] == "stop"
    assert len(one["tokens"]) < 128


@pytest.mark.slow
def test_control_characters_are_escaped_on_a_terminal_only(
    served_engine: ServedEngine, tmp_path: Path
) -> None:
    data = tmp_path / "hostile.jsonl"
    data.write_text(json.dumps({"prompt": "Where?", "completion": "\x1b[2J\x07gone"}) + "\n")
    options = ("--rank", "4", "--steps", "15", "--learning-rate", "0.02", "--sample-tokens", "4", "--json")
    trained = tinkex("train", "sft", str(data), *options, server=served_engine, cwd=tmp_path).json
    command = ("sample", "Where?", "--model-path", trained["sampler_checkpoint"], "--temperature", "0")
    assert tinkex(*command, server=served_engine).out == "\x1b[2J\x07gone\n"
    several = tinkex(*command, "-n", "2", server=served_engine).out
    assert several.count("\x1b[2J\x07gone") == 2
    env = {"TINKER_BASE_URL": served_engine.url, "TINKER_API_KEY": served_engine.key}
    assert on_a_terminal(*command, env=env, cwd=tmp_path).split("\r\n")[0] == r"\x1b[2J\x07gone"


@pytest.mark.slow
def test_the_first_line_comes_before_heavy_imports(tiny_model: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-X",
            "importtime",
            "-m",
            "tinkex",
            "sample",
            "Where?",
            "--local",
            "--max-tokens",
            "2",
        ],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "TINKEX_HOME": str(tmp_path), "TINKEX_MODELS": f"tiny/llama={tiny_model}"},
    )
    first, _, rest = done.stderr.partition("starting the engine in this process\n")
    for heavy in ("numpy", "msgspec", "tinkex.clients", "tinkex.engine"):
        assert heavy not in first
        assert heavy in rest
    assert "loading tiny" in rest


@pytest.mark.slow
@pytest.mark.parametrize("form", [(), ("-n", "2")], ids=["streamed", "several"])
def test_a_sample_that_ends_with_the_context_says_so(
    served_engine: ServedEngine, tmp_path: Path, form: tuple[str, ...]
) -> None:
    (model,) = tinkex("model", "list", "--json", server=served_engine).json["models"]
    prompt = tmp_path / "prompt.json"
    prompt.write_text(json.dumps({"tokens": [5] * (model["max_context_length"] - 3)}))
    command = ("sample", "--file", str(prompt), "--seed", "3", *form)
    assert "context" not in tinkex(*command, "--max-tokens", "2", server=served_engine).err
    done = tinkex(*command, "--max-tokens", "16", server=served_engine)
    assert "(stopped after 3 of 16 tokens, at the end of the model's context)" in done.err
