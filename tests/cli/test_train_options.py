"""Options of ``tinkex train`` that change a run: accumulated batches, rewards with weights, a KL penalty, and the report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.commands import Done, tinkex
from tests.cli.test_train_checks import UNREACHABLE
from tests.servers import ServedEngine

COMMON = ("--rank", "2", "--batch-size", "2", "--sample-tokens", "2", "--max-length", "200")
GRPO = ("--group-size", "2", "--max-tokens", "4")
REWARDS = "def vowels(completion):\n    return sum(completion.count(c) for c in 'aeiou')\ndef size(completion):\n    return len(completion)\n"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "rewards.py").write_text(REWARDS)
    file = tmp_path / "data.jsonl"
    row = {"completion": "The sea.", "chosen": "The sea.", "rejected": "A dog."}
    file.write_text(
        "".join(json.dumps({"prompt": f"Where is the boat number {n}?", **row}) + "\n" for n in range(12))
    )
    return file


def trained(server: ServedEngine, recipe: str, data: Path, *options: str) -> Done:
    return tinkex("train", recipe, data.name, *COMMON, *options, server=server, cwd=data.parent)


@pytest.mark.parametrize(
    ("recipe", "options", "said", "code"),
    [
        ("sft", ("--accumulate", "0"), "'--accumulate': 0 is not in the range", 2),
        ("sft", ("--ttl", "60"), "--save-every", 2),
        (
            "sft",
            ("--eval-every", "2", "--eval-fraction", "0"),
            "--eval-every needs examples for evaluation",
            1,
        ),
        ("grpo", ("--reward-regex", "x", "--kl-coef", "-1"), "kl_coef must be at least 0", 2),
        ("grpo", ("--reward-regex", "x", "--max-tokens", "200"), "leaves no room for a prompt", 2),
        ("grpo", ("--reward", "rewards.py:vowels=much"), "is not a number", 1),
        (
            "grpo",
            ("--reward", "rewards.py:vowels", "--reward", "rewards.py:none"),
            "has no function 'none'",
            1,
        ),
        ("grpo", ("--reward", "rewards.py:vowels=0"), "every reward has the weight 0", 1),
        (
            "grpo",
            ("--reward", "rewards.py:vowels", "--reward-regex", "("),
            "not a valid regular expression",
            1,
        ),
    ],
)
def test_a_mistake_in_an_option_is_found_without_contacting_the_server(
    recipe: str, options: tuple[str, ...], said: str, code: int, data: Path
) -> None:
    command = ("train", recipe, data.name, *COMMON, *options, *UNREACHABLE)
    done = tinkex(*command, cwd=data.parent, home=data.parent)
    assert (done.code, done.out) == (code, "")
    assert said in done.err
    assert "127.0.0.1:9" not in done.err
    assert not (data.parent / "tinkex-runs").exists()


def test_options_of_the_group_are_not_ignored(tmp_path: Path) -> None:
    for command in (
        ("--check",),
        ("-o", "x"),
        ("--config", "a.toml", "--report", "x"),
        ("--report", "x", "sft", "d"),
    ):
        assert tinkex("train", *command, cwd=tmp_path, home=tmp_path).code == 2, command


@pytest.mark.slow
def test_accumulated_batches_are_planned_trained_and_reported(
    served_engine: ServedEngine, data: Path
) -> None:
    options = ("--accumulate", "3", "--epochs", "2")
    plan = trained(served_engine, "sft", data, *options, "--check")
    assert "Steps     4, each of up to 3 batches whose gradients are added\n" in plan.out
    assert "Packing   12 passes of 1 to 2 sequences, " in plan.out
    done = trained(served_engine, "sft", data, *options, "-o", "run", "--json").json
    assert done["num_steps"] == 4
    packed = [one for line in done["metrics"] for one in line.get("packing", ())]
    assert len(packed) == 12
    planned = trained(served_engine, "sft", data, *options, "--check", "--json").json
    assert planned["packing"] == packed
    assert planned["passes_per_step"] == 3
    for line in (data.parent / "run" / "metrics.jsonl").read_text().splitlines():
        value = json.loads(line)
        if "packing" in value:
            for one in value["packing"]:
                assert 0 < one["different_tokens"] <= one["computed_tokens"] <= one["num_tokens"]
    assert "Packing             12 passes of " in (data.parent / "run" / "report.txt").read_text()


@pytest.mark.slow
def test_several_rewards_and_a_penalty_are_logged_each_and_repeated_from_the_config(
    served_engine: ServedEngine, data: Path
) -> None:
    rewards = ("--reward", "rewards.py:vowels", "--reward", "rewards.py:size=-0.5", "--reward-regex", "e")
    options = (*rewards, *GRPO, "--kl-coef", "0.1", "--steps", "2", "--accumulate", "2", "--report")
    shown = trained(served_engine, "grpo", data, *options, "-o", "run")
    assert shown.code == 0, shown.err
    assert "first and last step: reward_vowels " in shown.out
    assert ", kl 0.000 → " in shown.out
    assert "Report              run/report.html" in shown.out
    lines = [json.loads(line) for line in (data.parent / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "reward" in line]
    assert len(steps) == 2
    for line in steps:
        parts = line["reward_vowels"] - 0.5 * line["reward_size"] + line["reward_regex"]
        assert line["reward"] == pytest.approx(parts, abs=1e-6)
        assert "kl" in line
    assert {"eval_reward", "eval_reward_vowels", "eval_reward_size", "eval_reward_regex"} <= set(lines[0])
    page = (data.parent / "run" / "report.html").read_text()
    assert "— reward_size per step" in page
    config = (data.parent / "run" / "run.toml").read_text()
    for line in ('reward = ["rewards.py:vowels", "rewards.py:size=-0.5"]', 'reward_regex = ["e"]', "kl_coef = 0.1",
                 "accumulate = 2", "report = true"):  # fmt: skip
        assert line in config
    again = tinkex("train", "--config", "run/run.toml", "-o", "again", server=served_engine, cwd=data.parent)
    assert again.code == 0, again.err
    assert (data.parent / "again" / "report.html").exists()
    repeated = json.loads((data.parent / "again" / "metrics.jsonl").read_text().splitlines()[1])
    assert repeated["reward"] == pytest.approx(steps[0]["reward"]), "the same answers"


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["sft", "dpo", "grpo"])
def test_the_report_of_a_run_can_be_written_afterwards(
    served_engine: ServedEngine, data: Path, recipe: str
) -> None:
    options = (*GRPO, "--reward-regex", "e") if recipe == "grpo" else ()
    done = trained(served_engine, recipe, data, *options, "--steps", "2", "-o", "run")
    assert done.code == 0, done.err
    assert not (data.parent / "run" / "report.html").exists()
    written = tinkex("train", "--report", "run", cwd=data.parent, home=data.parent)
    assert (written.code, written.out) == (0, "Wrote run/report.html\n")
    page = (data.parent / "run" / "report.html").read_text()
    assert f"({recipe.upper()})" in page
    assert page.count("<svg ") >= 1
    assert page.count("<th>Before</th>") == 3


def test_the_report_of_a_run_that_is_missing_or_not_complete_says_what_to_do(tmp_path: Path) -> None:
    missing = tinkex("train", "--report", "none", cwd=tmp_path, home=tmp_path)
    assert missing.code == 1
    assert "none contains no run" in missing.err
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.toml").write_text(
        'recipe = "sft"\ndata = "a.jsonl"\n[run]\nbase_model = "m"\ndata_sha256 = "0"\n'
    )
    partial = tinkex("train", "--report", "run", cwd=tmp_path, home=tmp_path)
    assert partial.code == 1
    assert "not complete; resume it with: tinkex train sft --resume run" in partial.err
