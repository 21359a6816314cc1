"""The output of ``tinkex train`` starts before anything takes time, and every long phase is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.commands import on_a_terminal, tinkex
from tests.servers import ServedEngine

pytestmark = pytest.mark.slow

COMMON = ("--rank", "2", "--steps", "2", "--batch-size", "2", "--sample-tokens", "2")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "data.jsonl"
    line = {"prompt": "Where?", "completion": "The sea.", "chosen": "The sea.", "rejected": "A dog."}
    file.write_text((json.dumps(line) + "\n") * 12)
    return file


def in_order(text: str, *parts: str) -> None:
    place = 0
    for part in parts:
        found = text.find(part, place)
        assert found >= 0, f"{part!r} does not follow in {text}"
        place = found + len(part)


def test_the_first_line_comes_before_heavy_imports_and_the_model(
    tiny_model: Path, data: Path, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "tinkex", "train", "sft", str(data), "--local", *COMMON],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env={
            **os.environ,
            "TINKEX_HOME": str(tmp_path / "home"),
            "TINKEX_MODELS": f"tiny/llama={tiny_model}",
        },
    )
    first = done.stderr.partition("Reading ")[0]
    for heavy in ("| torch", "tinkex.engine", "tinkex.clients", "numpy", "msgspec", "tokenizers"):
        assert heavy not in first
    in_order(done.stderr, "Reading ", "11 examples", "starting the engine in this process", "loading tiny", "step 2/2")  # fmt: skip


def test_an_export_says_what_it_opens_before_heavy_imports(tiny_model: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "tinkex", "model", "export", "tiny/llama", "mine.gguf"],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env={
            **os.environ,
            "TINKEX_HOME": str(tmp_path / "home"),
            "TINKEX_MODELS": f"tiny/llama={tiny_model}",
        },
    )
    first = done.stderr.partition("opening tiny/llama\n")[0]
    for heavy in ("| torch", "tinkex.engine", "numpy", "tokenizers"):
        assert heavy not in first
    in_order(done.stderr, "opening tiny/llama\n", "merging weights\n")


@pytest.mark.parametrize(
    ("recipe", "options", "phases"),
    [
        ("sft", (), ("sampling before training", "evaluating", "step 1/2", "sampling after training")),
        ("dpo", (), ("sampling before training", "evaluating", "logprobs of the reference model  2/8", "step 2/2")),
        (
            "grpo",
            ("--reward-regex", "e", "--group-size", "2", "--max-tokens", "4"),
            ("sampling before training", "evaluating", "drawing answers for step 1  1/2", "drawing answers for step 2", "step 1/2"),
        ),
        (
            "grpo",
            ("--reward-regex", "e", "--group-size", "2", "--max-tokens", "4", "--accumulate", "2", "--kl-coef", "0.1"),
            ("evaluating", "drawing answers for step 1  4/4", "logprobs of the reference model  8/8", "drawing answers for step 2", "step 2/2"),
        ),
    ],
)  # fmt: skip
def test_every_long_phase_is_shown_on_a_terminal(
    served_engine: ServedEngine,
    data: Path,
    tmp_path: Path,
    recipe: str,
    options: tuple[str, ...],
    phases: tuple[str, ...],
) -> None:
    env = {"TINKER_BASE_URL": served_engine.url, "TINKER_API_KEY": served_engine.key}
    command = ("train", recipe, str(data), *COMMON, "--eval-fraction", "0.34", *options)
    shown = on_a_terminal(*command, env=env, cwd=tmp_path)
    in_order(
        shown,
        "Reading ",
        f"{data} (prompt",
        "connecting to",
        "opening the model",
        "run in tinkex-runs",
        "creating the run",
        *phases,
        "writing the report",
    )


def test_without_a_terminal_each_phase_is_one_line(
    served_engine: ServedEngine, data: Path, tmp_path: Path
) -> None:
    options = ("--reward-regex", "e", "--group-size", "2", "--max-tokens", "4")
    done = tinkex(
        "train", "grpo", str(data), *COMMON, "--steps", "4", *options, server=served_engine, cwd=tmp_path
    )
    assert done.err.count("sampling before training\n") == 1
    assert done.err.count("drawing answers for step 1\n") == 1
    assert "drawing answers for step 4" not in done.err
    assert "\x1b" not in done.err
