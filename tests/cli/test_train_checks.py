"""``tinkex train`` checks everything that it can before a model is opened or a run exists."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.commands import Done, tinkex
from tests.servers import ServedEngine

CHAT = {"prompt": "Where?", "completion": "The sea."}


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    file = tmp_path / "chats.jsonl"
    file.write_text((json.dumps(CHAT) + "\n") * 6)
    return file


def num_runs(server: ServedEngine) -> int:
    total: int = tinkex("run", "list", "--json", server=server).json["total"]
    return total


UNREACHABLE = ("--base-url", "http://127.0.0.1:9", "--api-key", "tml-x")


@pytest.mark.parametrize(
    ("recipe", "content", "options", "said"),
    [
        ("sft", None, (), "there is no file"),
        ("sft", "{", (), "invalid JSON"),
        ("sft", '{"text": "x"}', (), "the columns are not recognised: it has text"),
        ("sft", '{"a": "x", "b": "y"}', ("--columns", "prompt=a,completion=c"), "no column 'c'"),
        ("grpo", '{"prompt": "x"}', ("--reward-regex", "("), "not a valid regular expression"),
        ("grpo", '{"prompt": "x"}', ("--reward", "none.py:f"), "there is no file none.py"),
        ("sft", json.dumps(CHAT), ("--early-stop", "1"), "--early-stop needs examples for evaluation"),
    ],
)
def test_a_mistake_is_found_without_contacting_the_server(
    recipe: str, content: str | None, options: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    data = tmp_path / "data.jsonl"
    if content is not None:
        data.write_text(content + "\n")
    done = tinkex("train", recipe, str(data), *options, *UNREACHABLE, cwd=tmp_path, home=tmp_path)
    assert (done.code, done.out) == (1, "")
    assert said in done.err
    assert "127.0.0.1:9" not in done.err
    assert not (tmp_path / "tinkex-runs").exists()


REWARDS = """
def forgot(completion):
    if completion:
        return 1.0

def fails(completion):
    return float(completion[0] == "A")

def lacks(completion, example):
    return float(completion == example["solution"])
"""


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        ("forgot", "returned None for ''; it must return a number on every path"),
        ("fails", "failed on '': IndexError"),
        ("lacks", "failed on '': KeyError: 'solution'"),
    ],
)
def test_a_reward_is_tried_on_an_empty_answer_before_anything_starts(
    reward: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "x", "answer": "y"}\n')
    (tmp_path / "rewards.py").write_text(REWARDS)
    command = ("train", "grpo", "prompts.jsonl", "--reward", f"rewards.py:{reward}", *UNREACHABLE)
    done = tinkex(*command, cwd=tmp_path, home=tmp_path)
    assert (done.code, done.out) == (1, "")
    assert f"the reward rewards.py:{reward} {said}" in done.err
    assert "127.0.0.1:9" not in done.err
    assert not (tmp_path / "tinkex-runs").exists()


@pytest.mark.slow
def test_a_setting_that_the_server_rejects_leaves_no_run(
    served_engine: ServedEngine, chats: Path, tmp_path: Path
) -> None:
    before = num_runs(served_engine)
    for _ in range(2):
        command = ("train", "sft", str(chats), "--rank", "100000", "-o", "run")
        done = tinkex(*command, server=served_engine, cwd=tmp_path)
        assert done.code == 1
        assert "rank is 100000; this server trains ranks 1 to 512" in done.err
    assert num_runs(served_engine) == before
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_where_nothing_listens_no_run_starts(chats: Path, tmp_path: Path) -> None:
    done = tinkex(
        "train", "sft", str(chats), *UNREACHABLE, cwd=tmp_path, home=tmp_path, TINKEX_MAX_RETRIES="0"
    )
    assert (done.code, done.out) == (1, "")
    assert "no reply from http://127.0.0.1:9: connection refused" in done.err
    assert not (tmp_path / "tinkex-runs").exists()


def test_a_missing_reward_is_explained_by_its_options(chats: Path, tmp_path: Path) -> None:
    done = tinkex("train", "grpo", str(chats), *UNREACHABLE, cwd=tmp_path, home=tmp_path)
    assert done.code == 2
    assert "--reward FILE.PY:FUNCTION" in done.err
    assert "--reward-regex PATTERN" in done.err
    assert "reward=" not in done.err
    assert "reward_regex=" not in done.err


def test_an_output_directory_that_cannot_be_used_is_found_first(chats: Path, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "settings.json").write_text("{}")
    for output, said in (("old", "already contains a run"), ("chats.jsonl/run", "is not a directory")):
        done = tinkex(
            "train",
            "sft",
            str(chats),
            "-o",
            str(tmp_path / output),
            *UNREACHABLE,
            cwd=tmp_path,
            home=tmp_path,
        )
        assert done.code == 1
        assert said in done.err
        assert "127.0.0.1:9" not in done.err


@pytest.mark.slow
def test_examples_that_are_too_long_start_no_run(
    served_engine: ServedEngine, chats: Path, tmp_path: Path
) -> None:
    before = num_runs(served_engine)
    done = tinkex("train", "sft", str(chats), "--max-length", "3", server=served_engine, cwd=tmp_path)
    assert done.code == 1
    assert "--max-length" in done.err
    assert num_runs(served_engine) == before
    assert not (tmp_path / "tinkex-runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["sft", "dpo", "grpo"])
def test_a_dry_run_says_what_would_be_done_and_starts_nothing(
    served_engine: ServedEngine, recipe: str, tmp_path: Path
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text((json.dumps({**CHAT, "chosen": "The sea.", "rejected": "A dog."}) + "\n") * 20)
    options = ("--batch-size", "3", "--epochs", "2", "--check", "--max-length", "200")
    if recipe == "grpo":
        options += ("--reward-regex", "sea", "--max-tokens", "4", "--group-size", "2")
    before = num_runs(served_engine)
    done = tinkex("train", recipe, str(data), *options, server=served_engine, cwd=tmp_path)
    assert done.code == 0, done.err
    for line in ("Model     tiny/llama", "18 to train on, 2 for evaluation", "Steps     12", "Time      about", "Memory    on the server"):  # fmt: skip
        assert line in done.out
    value = tinkex("train", recipe, str(data), *options, "--json", server=served_engine, cwd=tmp_path).json
    assert value["num_steps"] == 12
    assert value["num_tokens"] > 18
    assert num_runs(served_engine) == before
    assert not (tmp_path / "tinkex-runs").exists()


def test_data_for_another_recipe_names_the_command_with_its_server(tmp_path: Path) -> None:
    pairs = tmp_path / "my pairs.jsonl"
    pairs.write_text('{"prompt": "Q", "chosen": "a", "rejected": "b"}\n')
    done = tinkex("train", "sft", str(pairs), "--local", cwd=tmp_path, home=tmp_path)
    assert f"Train on it with: tinkex train dpo '{pairs}' --local" in done.err
    prompts = tmp_path / "titles.csv"
    prompts.write_text("title,body\nQ,A\n")
    done = tinkex(
        "train", "sft", "titles.csv", "--columns", "prompt=title", "--local", cwd=tmp_path, home=tmp_path
    )
    advised = "tinkex train grpo titles.csv --columns prompt=title --reward FILE.PY:FUNCTION --local"
    assert f"Train on it with: {advised}" in done.err


def trained(server: ServedEngine, data: Path, *options: str, cwd: Path) -> Done:
    common = ("--rank", "2", "--steps", "2", "--batch-size", "2", "--sample-tokens", "2")
    return tinkex("train", "sft", str(data), *common, *options, server=server, cwd=cwd)


@pytest.mark.slow
def test_a_run_is_resumed_where_it_ran_and_repeated_from_its_config(
    served_engine: ServedEngine, chats: Path, tmp_path: Path
) -> None:
    done = trained(served_engine, chats, "-o", str(tmp_path / "run"), cwd=tmp_path)
    assert done.code == 0, done.err
    key = {"TINKER_API_KEY": served_engine.key}
    again = tinkex("train", "sft", "--resume", str(tmp_path / "run"), "--json", home=tmp_path, **key)
    assert again.json["num_steps"] == 2, "without --base-url"
    wrong = tinkex("train", "dpo", "--resume", str(tmp_path / "run"), home=tmp_path, **key)
    command = f"tinkex train sft --resume {tmp_path / 'run'} --base-url {served_engine.url}"
    assert wrong.code == 1
    assert command in wrong.err
    config = str(tmp_path / "run" / "run.toml")
    repeated = tinkex("train", "--config", config, "-o", str(tmp_path / "b"), "--json", home=tmp_path, **key)
    assert repeated.json["metrics"][0] == pytest.approx(again.json["metrics"][0], abs=1e-4)
    assert tinkex("train", "--config", config, "sft", str(chats), server=served_engine).code == 2


@pytest.mark.slow
def test_a_run_is_repeated_and_resumed_from_any_directory(
    served_engine: ServedEngine, tmp_path: Path
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "elsewhere").mkdir()
    line = json.dumps({"prompt": "Where?", "completion": "The sea."})
    (tmp_path / "here" / "chats.jsonl").write_text(f"{line}\n" * 4)
    (tmp_path / "here" / "rewards.py").write_text("def short(completion):\n    return -len(completion)\n")
    done = tinkex(
        "train", "grpo", "chats.jsonl", "--eval-data", "chats.jsonl", "--reward", "rewards.py:short=0.5", "--rank", "2",
        "--steps", "1", "--group-size", "2", "--max-tokens", "2", "--sample-tokens", "2", "-o", "run",
        server=served_engine, cwd=tmp_path / "here",
    )  # fmt: skip
    assert done.code == 0, done.err
    for command in (("grpo", "--resume", "../here/run"), ("--config", "../here/run/run.toml", "-o", "again")):
        again = tinkex("train", *command, "--json", server=served_engine, cwd=tmp_path / "elsewhere")
        assert again.json["num_steps"] == 1, command


def test_a_config_whose_description_of_a_run_is_wrong_is_rejected(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text('recipe = "sft"\ndata = "x.jsonl"\n[run]\nserver = 3\n')
    done = tinkex("train", "--config", str(config), "--local", cwd=tmp_path, home=tmp_path)
    assert done.code == 1
    assert "[run] is written by a run" in done.err


def test_a_config_with_an_unknown_setting_is_rejected(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text('recipe = "sft"\ndata = "x.jsonl"\nlearning_rat = 1e-3\n')
    done = tinkex("train", "--config", str(config), "--local", cwd=tmp_path, home=tmp_path)
    assert done.code == 1
    assert "sft has no setting 'learning_rat'; did you mean 'learning_rate'?" in done.err


@pytest.mark.slow
def test_a_run_directory_of_an_earlier_release_still_resumes(
    served_engine: ServedEngine, chats: Path, tmp_path: Path
) -> None:
    import hashlib

    run = tmp_path / "run"
    run.mkdir()
    kept = {"recipe": "sft", "data": str(chats), "output": str(run), "model": "tiny/llama", "rank": 2, "steps": 1,
            "sample_tokens": 2, "base_model": "tiny/llama", "data_sha256": hashlib.sha256(chats.read_bytes()).hexdigest()}  # fmt: skip
    (run / "settings.json").write_text(json.dumps(kept))
    done = tinkex("train", "sft", "--resume", str(run), "--json", server=served_engine)
    assert done.json["num_steps"] == 1


def test_a_run_that_cannot_be_resumed_now_says_how_later(chats: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    kept = {
        "recipe": "sft",
        "data": str(chats),
        "output": str(run),
        "base_model": "tiny/llama",
        "data_sha256": "",
    }
    (run / "settings.json").write_text(json.dumps(kept))
    command = ("train", "sft", "--resume", str(run), *UNREACHABLE)
    done = tinkex(*command, cwd=tmp_path, home=tmp_path, TINKEX_MAX_RETRIES="0")
    assert done.code == 1
    assert f"Resume with: tinkex train sft --resume {run} --base-url http://127.0.0.1:9" in done.err


@pytest.mark.slow
def test_training_stops_early_and_keeps_the_best_checkpoint(
    served_engine: ServedEngine, tmp_path: Path
) -> None:
    data, other = tmp_path / "data.jsonl", tmp_path / "eval.jsonl"
    data.write_text('{"prompt": "Where?", "completion": "The sea."}\n' * 4)
    other.write_text(
        '{"prompt": "Where?", "completion": "A dog is not there."}\n' * 2
    )  # learning makes it unlikely
    done = tinkex(
        "train", "sft", str(data), "--eval-data", str(other), "--eval-every", "1", "--steps", "40", "--rank", "4",
        "--learning-rate", "0.05", "--schedule", "constant", "--keep-best", "--early-stop", "2", "--sample-tokens", "2",
        "-o", str(tmp_path / "run"), "--json", server=served_engine,
    ).json  # fmt: skip
    assert done["stopped_early"]
    assert done["num_steps"] < 40
    evaluated = {
        line["step"]: line["eval_loss"] for line in done["metrics"] if "eval_loss" in line and line["step"]
    }
    assert done["best_step"] == min(evaluated, key=lambda step: evaluated[step])
    assert done["num_steps"] - done["best_step"] == 2
    assert done["checkpoint"].endswith("/weights/best")
    run = done["checkpoint"].split("/")[2]
    kept = tinkex("checkpoint", "list", "--run-id", run, "--json", server=served_engine).json["checkpoints"]
    names = sorted(one["checkpoint_id"] for one in kept)
    assert names == ["sampler_weights/best", "sampler_weights/final", "weights/best", "weights/final"]
    shown = (tmp_path / "run" / "report.txt").read_text()
    assert "stopped early" in shown
    assert f"after step {done['best_step']}, the best evaluation" in shown
