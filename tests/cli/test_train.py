"""``tinkex train`` as a process: output, errors, Ctrl-C and resume."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.commands import tinkex
from tests.servers import ServedEngine

pytestmark = pytest.mark.slow

COMMON = ("--rank", "2", "--batch-size", "2", "--sample-tokens", "4")


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    file = tmp_path / "chats.jsonl"
    lines = [{"messages": [{"role": "user", "content": f"Q{n}?"}, {"role": "assistant", "content": "The sea."}]} for n in range(6)]  # fmt: skip
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_a_run_prints_a_report_and_can_be_sampled(
    served_engine: ServedEngine, chats: Path, tmp_path: Path
) -> None:
    done = tinkex(
        "train", "sft", str(chats), "--learning-rate", "0.02", "--epochs", "4", *COMMON,
        server=served_engine, cwd=tmp_path, process=True,
    )  # fmt: skip
    assert done.code == 0, done.err
    assert "step 12/12  loss" in done.err
    assert "before training: eval loss" in done.err
    assert "loss per step" in done.out
    assert "After    The sea." in done.out
    path = next(line.split()[-1] for line in done.out.splitlines() if line.startswith("Sampler checkpoint"))
    answer = tinkex("sample", "Q1?", "--model-path", path, "--temperature", "0", server=served_engine)
    assert answer.out.strip() == "The sea."
    (run,) = (tmp_path / "tinkex-runs").iterdir()
    assert run.name.startswith("sft-")


def test_with_json_stdout_holds_only_json(served_engine: ServedEngine, chats: Path, tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(json.dumps({"prompt": "Q?", "chosen": "The sea.", "rejected": "A dog."}) + "\n")
    done = tinkex(
        "train", "dpo", str(pairs), "--steps", "2", "-o", str(tmp_path / "a"), "--json", *COMMON, server=served_engine
    )  # fmt: skip
    assert done.json["num_steps"] == 2
    assert done.err == ""
    grpo = tinkex(
        "train", "grpo", str(pairs), "--reward-regex", "e", "--group-size", "2", "--max-tokens", "3", "--steps", "1",
        "-o", str(tmp_path / "b"), "--json", *COMMON, server=served_engine,
    )  # fmt: skip
    assert grpo.json["headline"] == "reward"


def test_invalid_data_and_settings_are_rejected_before_training(
    served_engine: ServedEngine, chats: Path, tmp_path: Path
) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "x", "completion": "y"}\n{"prompt": 3}\n')
    done = tinkex("train", "sft", str(bad), server=served_engine, cwd=tmp_path)
    assert (done.code, done.out) == (1, "")
    assert f"{bad}:2: " in done.err
    assert not (tmp_path / "tinkex-runs").exists()
    long = tinkex("train", "sft", str(chats), "--max-length", "5", server=served_engine, cwd=tmp_path)
    assert f"{chats}:" in long.err
    assert "--too-long" in long.err
    for wrong in (
        ("sft",),
        ("sft", str(chats), "--resume", str(tmp_path)),
        ("sft", str(chats), "--learning-rate", "0"),
        ("grpo", str(chats)),
        ("sft", "--resume", str(tmp_path), "--rank", "3"),
        ("sft", str(chats), "--model", "a", "--model-path", "tinker://r/weights/x"),
    ):
        assert tinkex("train", *wrong, server=served_engine, cwd=tmp_path).code == 2, wrong


def _trained(run: Path) -> bool:
    """Whether the metrics contain a step; the evaluation before the first step is step 0."""
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text().split("\n")[:-1] if metrics.exists() else []
    return any(json.loads(line)["step"] > 0 for line in lines)


def test_ctrl_c_saves_the_state_and_resume_continues(
    served_engine: ServedEngine, chats: Path, tmp_path: Path
) -> None:
    env = {
        **os.environ,
        "TINKER_BASE_URL": served_engine.url,
        "TINKER_API_KEY": served_engine.key,
    }
    run = tmp_path / "run"
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tinkex",
            "train",
            "sft",
            str(chats),
            "--steps",
            "100000",
            "-o",
            str(run),
            *COMMON,
        ],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline and not _trained(run):
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, out) == (130, ""), err
    assert "Traceback" not in err
    assert "Ctrl-C again exits immediately" in err
    assert f"Resume with: tinkex train sft --resume {run}" in err
    (saved,) = ((run / "checkpoints.jsonl").read_text()).splitlines()
    step = json.loads(saved)["step"]
    config = run / "run.toml"
    config.write_text(config.read_text().replace("steps = 100000", f"steps = {step + 1}"))
    resumed = tinkex("train", "sft", "--resume", str(run), "--json", server=served_engine)
    assert resumed.json["num_steps"] == step + 1
    shown = tinkex("train", "sft", "--resume", str(run), server=served_engine).out
    assert f"{step + 1} steps on 5 examples, those after step {step} in " in shown.splitlines()[0]
