"""``tinkex eval`` on a server and on the embedded engine: scores, comparisons, files, and what is rejected first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import tinkex
from tests.scripted import ScriptedServer, over_http
from tests.servers import ServedEngine

pytestmark = pytest.mark.slow

QUESTIONS = {"Where?": "The sea.", "When?": "At noon."}


def write(file: Path, *items: Any) -> str:
    file.write_text("".join(json.dumps(item) + "\n" for item in items))
    return str(file)


@pytest.fixture(scope="module")
def trained(served_engine: ServedEngine, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint that has learnt the answers."""
    folder = tmp_path_factory.mktemp("learnt")
    write(folder / "data.jsonl", *({"prompt": q, "completion": a} for q, a in QUESTIONS.items()))
    options = ("--rank", "8", "--steps", "30", "--learning-rate", "0.02", "--eval-fraction", "0")
    done = tinkex(
        "train",
        "sft",
        "data.jsonl",
        *options,
        "--sample-tokens",
        "4",
        "--json",
        server=served_engine,
        cwd=folder,
    )
    path: str = done.json["sampler_checkpoint"]
    return path


def test_a_checkpoint_is_compared_with_its_base_model(
    served_engine: ServedEngine, trained: str, tmp_path: Path
) -> None:
    exact = write(tmp_path / "exact.jsonl", *({"prompt": q, "answer": a} for q, a in QUESTIONS.items()))
    regex = write(tmp_path / "regex.jsonl", {"prompt": "Where?", "pattern": "(?i)^the SEA"})
    choice = write(
        tmp_path / "choice.jsonl",
        *({"prompt": q, "choices": sorted(QUESTIONS.values()), "answer": a} for q, a in QUESTIONS.items()),
    )
    command = ("eval", exact, regex, choice, "--model-path", trained, "--compare", "--max-tokens", "12")
    value = tinkex(*command, "--json", "-o", "items.jsonl", server=served_engine, cwd=tmp_path).json
    results = {(each["task"], each["metric"], each["model"]): each for each in value["results"]}
    assert set(results) == {
        (task, metric, model)
        for task, metric in [
            ("exact", "exact_match"),
            ("regex", "regex_match"),
            ("choice", "accuracy"),
            ("choice", "accuracy_norm"),
        ]
        for model in ("tiny/llama", trained)
    }
    after = results["exact", "exact_match", trained]
    assert (after["score"], after["change"], after["num_items"]) == (1.0, 1.0, 2)
    assert after["change_interval"] == [1.0, 1.0]
    assert after["interval_method"] == "wilson"
    assert after["interval"][0] < 1.0 <= after["interval"][1]
    assert results["exact", "exact_match", "tiny/llama"]["change"] is None
    assert results["regex", "regex_match", trained]["score"] == 1.0
    assert results["choice", "accuracy", trained]["score"] == 1.0
    items = [json.loads(line) for line in (tmp_path / "items.jsonl").read_text().splitlines()]
    assert len(items) == 2 * (2 + 1 + 2)
    mine = [item for item in items if item["model"] == trained and item["task"] == "exact"]
    assert [item["answers"] for item in mine] == [[answer] for answer in QUESTIONS.values()]
    ranked = next(item for item in items if item["task"] == "choice")
    assert len(ranked["logprobs"]) == 2
    shown = tinkex(*command, server=served_engine).out
    assert "95 % interval of it" in shown
    assert "+1.000" in shown
    assert trained in shown


def test_choices_are_ranked_by_the_logprobs_of_a_pass(served_engine: ServedEngine, tmp_path: Path) -> None:
    """The sums are those of ``sample --prompt-logprobs`` on the same tokens."""
    task = write(tmp_path / "raw.jsonl", {"prompt": "The quick ", "choices": ["fox", "model"], "answer": 0})
    tinkex("eval", task, "--raw", "-o", "items.jsonl", server=served_engine, cwd=tmp_path)
    item = json.loads((tmp_path / "items.jsonl").read_text())
    for choice, total in zip(item["choices"], item["logprobs"], strict=True):
        whole, before = (
            tinkex("sample", text, "--raw", "--max-tokens", "1", "--prompt-logprobs", "--json", server=served_engine).json
            for text in (f"The quick {choice}", "The quick")
        )  # fmt: skip
        length = len(whole["prompt_tokens"]) - len(before["prompt_tokens"])
        assert total == pytest.approx(sum(whole["prompt_logprobs"][-length:]), abs=1e-4)


def test_seeds_limits_and_scorers(served_engine: ServedEngine, tmp_path: Path) -> None:
    (tmp_path / "scorers.py").write_text(
        "def length(completion):\n    return min(1.0, len(completion) / 40)\n"
    )
    task = write(tmp_path / "free.jsonl", *({"prompt": f"Question {n}"} for n in range(6)))
    command = ("eval", task, "--scorer", "scorers.py:length", "--limit", "4", "-n", "3", "--temperature", "1",
               "--max-tokens", "8", "--json", "-o", "items.jsonl")  # fmt: skip

    def run(*more: str) -> tuple[Any, list[Any]]:
        value = tinkex(*command, *more, server=served_engine, cwd=tmp_path).json
        items = [json.loads(line)["answers"] for line in (tmp_path / "items.jsonl").read_text().splitlines()]
        return value["results"], items

    results, answers = run()
    assert (results[0]["metric"], results[0]["num_items"]) == ("score", 4)
    assert results[0]["interval_method"] == "bootstrap"
    assert len(answers) == 4
    assert all(len(each) == 3 for each in answers)
    assert len({answer for each in answers for answer in each}) > 6  # items and samples differ
    assert run() == (results, answers)  # the default seed is fixed
    assert run("--seed", "7")[1] != answers


@pytest.mark.parametrize(
    "more", [{"answer": "b"}, {"choices": ["b", "c"], "answer": "b"}], ids=["sampled", "ranked"]
)
def test_an_item_that_does_not_fit_is_named(
    served_engine: ServedEngine, tmp_path: Path, more: dict[str, Any]
) -> None:
    task = write(tmp_path / "long.jsonl", {"prompt": "a", **more}, {"prompt": "a " * 9000, **more})
    done = tinkex("eval", task, server=served_engine, cwd=tmp_path)
    assert done.code == 1
    assert "long.jsonl:2: prompt has" in done.err


def test_the_embedded_engine_evaluates_too(tiny_model: Path, tmp_path: Path) -> None:
    task = write(tmp_path / "task.jsonl", {"prompt": "Where?", "pattern": ""})
    models = f"tiny/llama={tiny_model}"
    command = ("eval", task, "--local", "--max-tokens", "4", "--json")
    done = tinkex(*command, process=True, home=tmp_path, TINKEX_MODELS=models)
    assert done.json["results"][0]["score"] == 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no task"),
        (("missing.jsonl",), "there is no file missing.jsonl"),
        (("bad.jsonl",), "bad.jsonl:1: it has no prompt"),
        (("good.jsonl", "--scorer", "nothing.py:f"), "there is no file nothing.py"),
        (("good.jsonl", "good.jsonl"), "two task files are named 'good'"),
        (("good.jsonl", "--model", "a", "--model", "a"), "--model names a model twice"),
        (("good.jsonl", "--compare"), "--compare needs a checkpoint"),
        (("good.jsonl", "-n", "2"), "temperature 0"),
        (("good.jsonl", "--temperature", "-1"), "temperature"),
        (("choice.jsonl", "--max-tokens", "3"), "--max-tokens is for sampled answers"),
        (("good.jsonl", "-o", "no/such/file"), "cannot be written"),
        (("--lm-eval", "arc_easy"), "pip install lm-eval"),
        (("good.jsonl", "--lm-eval-path", "."), "--lm-eval-path needs --lm-eval"),
        (("--lm-eval", "arc_easy", "--scorer", "a.py:b"), "--scorer needs a task file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_everything_is_checked_before_a_model_is_opened(
    arguments: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    write(tmp_path / "good.jsonl", {"prompt": "a", "answer": "b"})
    write(tmp_path / "choice.jsonl", {"prompt": "a", "choices": ["b", "c"], "answer": "b"})
    write(tmp_path / "bad.jsonl", {"answer": "b"})
    server = ScriptedServer()
    with over_http(server) as url:
        done = tinkex("eval", *arguments, "--base-url", url, "--api-key", "tml-x", cwd=tmp_path)
    assert done.code in {1, 2}
    assert message in done.err
    assert not server.calls


def test_training_scores_tasks_before_and_after_also_when_it_is_resumed(
    served_engine: ServedEngine, tmp_path: Path
) -> None:
    data = write(tmp_path / "data.jsonl", *({"prompt": q, "completion": a} for q, a in QUESTIONS.items()))
    task = write(tmp_path / "task.jsonl", *({"prompt": q, "answer": a} for q, a in QUESTIONS.items()))
    options = (
        "--rank",
        "8",
        "--steps",
        "30",
        "--learning-rate",
        "0.02",
        "--eval-fraction",
        "0",
        "--sample-tokens",
        "4",
    )
    command = ("train", "sft", data, *options, "-o", "run", "--eval-task", task)
    report = tinkex(*command, "--json", server=served_engine, cwd=tmp_path).json
    before, after = report["eval_tasks"]
    assert (before["task"], before["model"], before["score"]) == ("task", "tiny/llama", 0.0)
    assert (after["model"], after["score"], after["change"]) == (report["sampler_checkpoint"], 1.0, 1.0)
    assert json.loads((tmp_path / "run" / "eval_tasks.json").read_text())["eval_tasks"] == [before, after]
    again = tinkex("train", "sft", "--resume", "run", server=served_engine, cwd=tmp_path)
    assert "exact_match" in again.out
    assert "+1.000" in again.out
    write(tmp_path / "bad.jsonl", {"answer": "b"})
    wrong = tinkex("train", "sft", data, "--eval-task", "bad.jsonl", server=served_engine, cwd=tmp_path)
    assert wrong.code == 1
    assert "bad.jsonl:1: it has no prompt" in wrong.err
    assert not list(tmp_path.glob("tinkex-runs"))
